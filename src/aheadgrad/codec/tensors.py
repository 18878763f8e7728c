"""Tensors as safetensors, and back: dtypes, strides and shared memory as they were.

A tensor that is all there is to its memory is stored as it is, under a name. Others (views of one memory,
strides of their own, dtypes that safetensors does not know) are stored as the bytes of that memory, and as
what they look like in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from aheadgrad.errors import ArtifactError
from aheadgrad.torchlayer.memory import reach
from aheadgrad.torchlayer.named import DTYPES

_KNOWN = frozenset(
    """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64
    float8_e4m3fn float8_e5m2""".split()
)
_ALIGNED = 16


def store(tensors: Sequence[Tensor], names: Mapping[int, str]) -> tuple[bytes, list[list[Any]]]:
    """The bytes, and a row for each tensor; `names` has what some of them are called, by place."""
    tensors = [t.detach().resolve_conj().resolve_neg().requires_grad_(t.requires_grad) for t in tensors]
    memory: dict[Any, list[int]] = {}
    for k, t in enumerate(tensors):
        memory.setdefault(_memory_of(t) or ("empty", k), []).append(k)
    stored: dict[str, Tensor] = {}
    rows: dict[int, list[Any]] = {}
    for places in memory.values():
        (first, *others) = places
        t, name = tensors[first], names.get(first, f"constant {first}")
        if not others and t.is_contiguous() and _name(t.dtype) in _KNOWN:
            stored[name] = t.detach().cpu()
            rows[first] = [name, *_about(t), list(t.size()), None, None]
            continue
        name = f"memory {first}"
        stored[name], start = _bytes_of([tensors[k] for k in places])
        for k in places:
            t = tensors[k]
            offset = t.storage_offset() - start // t.dtype.itemsize
            rows[k] = [name, *_about(t), list(t.size()), list(t.stride()), offset]
    data: bytes = safetensors.torch.save(stored)
    return data, [rows[k] for k in range(len(tensors))]


def _memory_of(t: Tensor) -> Any:
    storage = t.untyped_storage()
    return (str(t.device), storage.data_ptr()) if storage.nbytes() else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _about(t: Tensor) -> tuple[str, bool, str]:
    return str(t.device), t.requires_grad, _name(t.dtype)


def _bytes_of(tensors: list[Tensor]) -> tuple[Tensor, int]:
    """The part of a memory that these tensors lie in, and where it starts."""
    starts = [t.storage_offset() * t.dtype.itemsize for t in tensors]
    ends = [reach(t.size(), t.stride(), int(t.storage_offset())) * t.dtype.itemsize for t in tensors]
    start = min(starts) // _ALIGNED * _ALIGNED
    storage, length = tensors[0].untyped_storage(), max(0, max(ends) - start)
    held = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    held.set_(storage, start, (length,), (1,))
    return held.cpu(), start


def restore(data: bytes, rows: Any, *, here: bool = True) -> list[Tensor]:
    """The tensors; ArtifactError for bytes or rows that `store` would not have given.

    Without `here` they stay in the memory of the CPU, whatever device they are for.
    """
    try:
        stored = safetensors.torch.load(data)
    except Exception as error:
        raise ArtifactError(f"The tensors cannot be read: {error}.") from error
    if type(rows) is not list:
        raise ArtifactError("What tensors look like is no list.")
    memory: dict[Any, Tensor] = {}
    found = [_restored(row, stored, memory, here) for row in rows]
    left = sorted(set(stored) - {name for name, _ in memory})
    if left:
        raise ArtifactError(f"There are tensors that nothing uses: {', '.join(left)[:200]}.")
    return found


def _restored(row: Any, stored: dict[str, Tensor], memory: dict[Any, Tensor], here: bool) -> Tensor:
    if type(row) is not list or len(row) != 7:
        raise ArtifactError("What a tensor looks like is no row.")
    name, device, requires_grad, dtype, size, stride, offset = row
    texts = type(name) is str and type(device) is str and type(dtype) is str
    if not texts or dtype not in DTYPES or type(requires_grad) is not bool:
        raise ArtifactError("What a tensor looks like is of the wrong types.")
    if name not in stored:
        raise ArtifactError(f"There is no tensor {name[:80]!r} in the file.")
    if stride is None and (name, device) in memory:
        raise ArtifactError(f"The tensor {name[:80]!r} is there twice.")
    held = memory.get((name, device))
    if held is None:
        held = memory[name, device] = _placed(stored[name].clone(), device if here else "cpu")
    if stride is not None:
        made = _part(held, DTYPES[dtype], size, stride, offset)
    elif [held.dtype, list(held.size()), None] == [DTYPES[dtype], size, offset]:
        made = held
    else:
        raise ArtifactError(f"The tensor {name[:80]!r} is not of the dtype and size that it is said to be.")
    if requires_grad and not (made.dtype.is_floating_point or made.dtype.is_complex):
        raise ArtifactError(f"The tensor {name[:80]!r} cannot require grad.")
    return made.requires_grad_(requires_grad)


def _placed(t: Tensor, device: str) -> Tensor:
    if device == "cpu":
        return t
    try:
        return t.to(torch.device(device))
    except Exception as error:
        raise ArtifactError(
            f"A tensor of the file is for {device[:80]!r}, which is not here: {error}"
        ) from error


def _part(held: Tensor, dtype: torch.dtype, size: Any, stride: Any, offset: Any) -> Tensor:
    if held.dtype is not torch.uint8 or held.dim() != 1:
        raise ArtifactError("A part of a memory lies in no memory.")
    numbers = [offset, *size, *stride] if type(size) is list and type(stride) is list else [None]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or len(size) != len(stride):
        raise ArtifactError("A part of a memory has no sizes and strides.")
    itemsize = dtype.itemsize
    if reach(size, stride, offset) * itemsize > held.numel() or offset * itemsize > held.numel():
        raise ArtifactError("A part of a memory reaches beyond it.")
    made = torch.empty(0, dtype=dtype, device=held.device)
    return made.set_(held.untyped_storage(), offset, size, stride)

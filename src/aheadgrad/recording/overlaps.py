"""The checks that kernels make before they write: overlapping memory, and lossy casts.

A recorded write goes into a fresh tensor, so nothing would stop what eager refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import Geometry
from aheadgrad.recording.geometry import geometry_of
from aheadgrad.recording.records import Record
from aheadgrad.recording.told_by_name import ALLOWED_ON_EXPANDED, CASTS_FREELY, NO_OVERLAP_AT_ALL, UNFOLDED
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.symbols import typical, typical_sizes, typical_strides
from aheadgrad.torchlayer.unbacked import sizes_in

_OPEN_ORDER = "an op reads memory that it writes to, in an order that eager leaves open"


def check_memory(name: str, written: Tensor, others: list[Tensor]) -> None:
    """Raises what eager's kernels raise."""
    try:
        _check_memory(name, written, others)
    except RuntimeError as error:
        if not isinstance(error, FallbackError) and any(map(sizes_in, (written, *others))):
            raise FallbackError("a write whose memory overlaps, for some sizes that values decide") from error
        raise


def _check_memory(name: str, written: Tensor, others: list[Tensor]) -> None:
    if any(type(step).__name__ == UNFOLDED for step in functional.view_steps(written)):
        raise FallbackError("a view made with unfold is written to")  # its base would be put together anew
    if 0 in typical_sizes(written):
        return  # whatever its strides: no element is written
    if name == "copy_" and any(_overlap(written, o) != "none" and _alike(written, o) for o in others):
        if geometry_of(written).repeats and (written.requires_grad or 1 in typical_sizes(written)):
            raise FallbackError(f"{name} writes to an expanded tensor")  # autograd takes it for a write
        return  # onto itself: the kernel returns at once
    if not is_dense(written) and geometry_of(written).repeats:
        if name in ALLOWED_ON_EXPANDED:
            raise FallbackError(f"{name} writes to an expanded tensor")
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single "
            "memory location. Please clone() the tensor before performing the operation."
        )
    if _may_overlap_itself(written):
        raise FallbackError("elements of a written tensor share memory")
    if name == "fill_":
        return  # with a number that is read first
    for other in others:
        if name == "copy_" and geometry_of(other).repeats:
            if _changes_what_it_reads(written, other):
                raise FallbackError(_OPEN_ORDER)
            continue
        status = _overlap(written, other)
        if (
            status == "unknown"
            and geometry_of(written).typical != geometry_of(other).typical
            and _touch(written, other)
        ):
            raise FallbackError(_OPEN_ORDER)
        if status == "partial" or (status == "full" and name in NO_OVERLAP_AT_ALL):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor "
                "refer to a single memory location. Please clone() the tensor before performing the "
                "operation."
            )


def check_list(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before `_foreach_mul_` and the like: eager takes one after the other, a recording all at once."""
    written = args[0]
    used: dict[Any, list[tuple[int, Tensor]]] = {}
    for value in (*args, *kwargs.values()):
        several = enumerate(value) if isinstance(value, list | tuple) else ((len(written), value),)
        for i, t in several:
            if isinstance(t, Tensor) and t.layout is torch.strided:
                used.setdefault(functional.storage_key(t), []).append((i, t))
    for i, t in enumerate(written):
        for j, other in used[functional.storage_key(t)] if t.layout is torch.strided else ():
            if (j > i and _meet(t, other)) or (j == i and _overlap(t, other) == "partial"):
                raise FallbackError("a list of tensors that share memory is written to")


def _meet(a: Tensor, b: Tensor) -> bool:
    status = _overlap(a, b)
    if status == "unknown":
        return max(_length(a), _length(b)) > _MOST_ELEMENTS or _touch(a, b)
    return status != "none"


_INTO_BASES = {  # how functionalization writes a view back into what it is a view of
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
}


def last_write(records: list[Record]) -> Record | None:
    """Of the records of one call that changes a tensor: the one that made the new contents."""
    like_views = *_INTO_BASES, torch.ops.aten._unsafe_view.default
    writes = [r for r in records if not is_view_op(r.target) and r.target not in like_views]
    found = writes or records
    return found[-1] if found else None


def check_casts(name: str, records: list[Record]) -> None:
    """`x.add_(z)` with a complex z and a real x: eager refuses to drop the imaginary part."""
    last = None if name in CASTS_FREELY else last_write(records)
    if last is None:
        return
    if last.target is torch.ops.aten._to_copy.default and isinstance(last.out, Tensor):
        before, after = last.args[0].dtype, last.out.dtype
        if not torch.can_cast(before, after):
            raise RuntimeError(f"result type {before} can't be cast to the desired output type {after}")


def _length(t: Tensor) -> Any:
    return typical(t.numel())


def _may_overlap_itself(t: Tensor) -> bool:
    """Not where each step, in order of size, is longer than all that lies below."""
    below = 0
    for stride, size in sorted(zip(typical_strides(t), typical_sizes(t), strict=True)):
        if size > 1:
            if stride <= below:
                return True
            below += (size - 1) * stride
    return False


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and geometry_of(a).typical == geometry_of(b).typical


def is_dense(t: Tensor) -> bool:
    """Is each address between the first and the last that of one element?"""
    step = 1
    for stride, size in sorted(zip(typical_strides(t), typical_sizes(t), strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _overlap(a: Tensor, b: Tensor) -> str:
    if a is b:
        return "full"
    if 0 in (_length(a), _length(b)) or functional.storage_key(a) != functional.storage_key(b):
        return "none"
    if not is_dense(a) or not is_dense(b):
        return "unknown"
    a0, b0 = (typical(t.storage_offset()) * t.element_size() for t in (a, b))
    a1, b1 = a0 + _length(a) * a.element_size(), b0 + _length(b) * b.element_size()
    if (a0, a1) == (b0, b1):
        return "full" if typical_strides(a) == typical_strides(b) else "partial"
    return "partial" if a0 < b1 and b0 < a1 else "none"


_MOST_ELEMENTS = 1 << 20


def _touch(a: Tensor, b: Tensor) -> bool:
    """Do two tensors of one storage have an element in common?"""
    if max(_length(a), _length(b)) > _MOST_ELEMENTS:
        return False
    with functional.outside():
        if a.element_size() != b.element_size():
            return bool(torch.isin(_bytes(a), _bytes(b)).any())
        return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _bytes(t: Tensor) -> Tensor:
    width = t.element_size()
    return (_addresses(t).unsqueeze(-1) * width + torch.arange(width)).flatten()


def _changes_what_it_reads(written: Tensor, other: Tensor) -> bool:
    """`x[:] = x[0]` is safe: what is both read and written gets the value that it has."""
    if _overlap(written, other) == "none" or not _touch(written, other):
        return False
    with functional.outside():
        to, source = _addresses(written), _addresses(other)
        both = torch.isin(to, source)
        return bool((to[both] != source[both]).any())


def _addresses(t: Tensor) -> Tensor:
    return addresses(geometry_of(t).typical)


def addresses(g: Geometry) -> Tensor:
    """Of all elements; outside of any recording."""
    out = torch.tensor(g.offset)
    for n, s in zip(g.size, g.stride, strict=True):
        out = out.unsqueeze(-1) + torch.arange(n) * s
    return out.flatten()

"""Stage values as bytes (`codec`): the data as JSON, and behind it the memory of constant tensors."""

from __future__ import annotations

import ctypes
import hashlib
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad.codec.decoding import decode, parsed
from aheadgrad.codec.encoding import Encoded, encode
from aheadgrad.errors import ArtifactError
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.partition.saved import Split
from aheadgrad.program.values import Origin
from aheadgrad.torchlayer.named import DTYPES

_MOST = 1 << 26  # bytes of constants


def as_bytes(joint: Joint, split: Split) -> bytes:
    encoded = encode((joint, split))
    files = {op.origin.file for op in joint.tape.ops if op.origin is not None}
    heads = json.dumps([[_head(t) for t in encoded.tensors], sorted(files)])
    memory = b"".join(map(_memory, encoded.tensors))
    return b"\n".join([encoded.text().encode(), heads.encode(), memory])


def from_bytes(data: bytes) -> tuple[Joint, Split]:
    text, _, rest = data.partition(b"\n")
    heads, _, memory = rest.partition(b"\n")
    tensors, start = [], 0
    looks, files = json.loads(heads)
    for dtype, size, stride, device in looks:
        kind = DTYPES[dtype]
        count = torch.Size(size).numel()
        end = start + count * kind.itemsize
        flat = (
            torch.frombuffer(bytearray(memory[start:end]), dtype=kind)
            if count
            else torch.empty(0, dtype=kind)
        )
        made = torch.empty_strided(size, stride, dtype=kind)
        tensors.append(made.copy_(flat.view(size)).to(device))
        start = end
    joint, split = decode(Encoded(parsed(text), tuple(tensors)))
    _complete_origins(joint, split, files)
    return joint, split


def _complete_origins(joint: Joint, split: Split, files: list[str]) -> None:
    """The codec leaves out the way to a file. Nobody has seen these ops yet: they can still be changed."""
    ways = {file.rpartition("/")[2]: file for file in files}
    if len(ways) < len(files):
        return
    known: dict[Origin, Origin] = {}
    for ops in (joint.tape.ops, *(p.ops for p in (split.forward, *split.backwards) if p is not None)):
        for op in ops:
            if op.origin is not None and op.origin.file in ways:
                whole = op.origin._replace(file=ways[op.origin.file])
                object.__setattr__(op, "origin", known.setdefault(whole, whole))


def program_digest(joint: Joint) -> str:
    """The same for the same program, in any process. Lines of the user's count only if policies name some:
    what we do ourselves, before and after the function runs, has the line of its caller."""
    if not joint.options.policies:
        ops = tuple(replace(op, origin=None) for op in joint.tape.ops)
        joint = replace(joint, tape=replace(joint.tape, ops=ops))
    encoded = encode(replace(joint, options=Options()))  # which are told apart elsewhere
    text = encoded.text()
    if '["float","nan"]' in text:
        raise ArtifactError("a number in it is a NaN, whose sign is not written")
    told = hashlib.sha256(text.encode())
    if sum(t.numel() * t.element_size() for t in encoded.tensors) > _MOST:
        raise ArtifactError("its constants are too large")
    for t in encoded.tensors:
        told.update(json.dumps(_head(t)).encode() + _memory(t))
    return told.hexdigest()


def _head(t: Tensor) -> list[Any]:
    return [str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()), str(t.device)]


def _memory(t: Tensor) -> bytes:
    plain = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""

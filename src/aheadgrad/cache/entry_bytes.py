"""Stage values as bytes (`codec`): two lines of JSON, and behind them the constant tensors."""

from __future__ import annotations

import ctypes
import hashlib
import json
from dataclasses import replace

from torch import Tensor

from aheadgrad.codec.decoding import decode, parsed
from aheadgrad.codec.encoding import Encoded, encode
from aheadgrad.codec.tensors import restore, store
from aheadgrad.errors import ArtifactError
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.partition.saved import Split
from aheadgrad.program.values import Origin

_MOST = 1 << 26  # bytes of constants


def as_bytes(joint: Joint, split: Split) -> bytes:
    encoded = encode((joint, split))
    files = {op.origin.file for op in joint.tape.ops if op.origin is not None}
    tensors, rows = store(encoded.tensors, {}) if encoded.tensors else (b"", [])
    return b"\n".join([encoded.text().encode(), json.dumps([rows, sorted(files)]).encode(), tensors])


def from_bytes(data: bytes) -> tuple[Joint, Split]:
    text, told, stored = data.split(b"\n", 2)
    rows, files = json.loads(told)
    tensors = restore(stored, rows) if rows else []
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
        told.update(f"{t.dtype} {t.shape} {t.stride()} {t.device}".encode() + _memory(t))
    return told.hexdigest()


def _memory(t: Tensor) -> bytes:
    plain = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""

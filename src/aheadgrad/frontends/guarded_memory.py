"""The part of a check about memory: what shares storage with what, offsets, views.

Only entries that change inputs, or that address memory themselves, care.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.capture.stage import Captured
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.subclasses import parts_of

if TYPE_CHECKING:
    from aheadgrad.frontends.checks import Check


class Memory:
    """What an entry depends on."""

    def __init__(self, captured: Captured, reals: Sequence[Tensor]) -> None:
        facts = captured.facts.inputs
        self.changed = {
            f.index for f in facts if f.data_changed or f.storage_changed or f.geometry is not None
        }
        several = sum(len(parts_of(r)) for r in reals) > 1 and not isinstance(reals[0], FakeTensor)
        self.changes = bool(self.changed) and several
        self.offsets = _depends_on_offsets(captured)

    @property
    def matters(self) -> bool:
        return self.changes or self.offsets

    def pattern(self, tensors: Sequence[Tensor]) -> Any:
        """Which of these share storage, and where in it they lie."""
        if not self.matters:
            return None
        keys = list(map(storage_key, tensors)) if self.changes else []
        if len(set(keys)) < len(keys):
            return [(keys.index(k), int(t.storage_offset())) for t, k in zip(tensors, keys, strict=True)]
        return [int(t.storage_offset()) for t in tensors] if self.offsets else None


def write_memory(check: Check, inputs: list[str], apart: Collection[int]) -> str:
    """In the check of a call: where inputs lie, and which of them share memory.

    Those in `apart` (by id) are checked elsewhere, unless they share memory with others. The names of those
    others are given back, if that matters.
    """
    session, memory = check.captured.session, check.memory
    named = [
        (text, part, id(real) in apart)
        for name, real in zip(inputs, check.reals, strict=True)
        for text, part in zip(check.parts.get(id(real), [name]), parts_of(real), strict=True)
    ]
    what = "places in memory"
    for entrance in session.no_views:
        check.equal(what, f"{check.find(entrance.real)}._is_view()", False)
    for name, member in zip(inputs[len(session.entrances) :], session.members, strict=True):
        base = base_of(member.real) if not member.is_root else None
        check.unless(f"{name}._base is {check.find(base) if base is not None else None}", what)
    if not memory.matters:
        return ""
    keys = [{storage_key(part) for _, part, away in named if away is side} for side in (True, False)]
    together = memory.changes and not keys[0].isdisjoint(keys[1])
    others = [(text, part) for text, part, away in named if together or not away]
    texts = "".join(f"{text}, " for text, _ in others)
    pattern = check.names.name(memory.pattern, "pattern")
    known = check.names.name(memory.pattern([part for _, part in others]), "known")
    if others:
        check.unless(f"{pattern}(({texts})) == {known}", what)
    return "" if together or not memory.changes else texts


def _depends_on_offsets(captured: Captured) -> bool:
    if captured.session.reads_offsets:
        return True
    if any(f.geometry for f in captured.facts.inputs) or captured.session.members:
        return True
    made = (*captured.facts.outputs, *captured.facts.roots)
    if any(getattr(getattr(f, "recipe", None), "geometry", None) for f in made):
        return True
    restride = torch.ops.aten.as_strided.default
    return any(r.target is restride for r in captured.session.trace.records)

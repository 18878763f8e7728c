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
        keys = [storage_key(t) for t in tensors]
        together = [keys.index(k) for k in keys] if self.changes else []
        told = [t for t, k in zip(tensors, keys, strict=True) if self.offsets or keys.count(k) > 1]
        return together, [int(t.storage_offset()) for t in told]


def write_memory(check: Check, inputs: list[str], state: Collection[int], apart: Collection[int]) -> str:
    """In the check of a call: where inputs lie, and which of them share memory.

    By id of an input: the places of `state` are checked elsewhere, and `apart` shares memory with no other.
    What is given back are the storages of those others, if that matters.
    """
    session = check.captured.session
    named = [
        (text, part, real)
        for name, real in zip(inputs, check.reals, strict=True)
        for text, part in zip(check.parts.get(id(real), [name]), parts_of(real), strict=True)
    ]

    def equal(text: str, value: Any) -> None:
        check.equal("places in memory", text, value)

    if check.memory.offsets:
        ours = {id(e.real) for e in session.entrances} - set(state)
        for text, part, real in named:
            if id(real) in ours:
                equal(f"{text}.storage_offset()", int(part.storage_offset()))
    for entrance in session.no_views:
        equal(f"{check.find(entrance.real)}._is_view()", False)
    for name, member in zip(inputs[len(session.entrances) :], session.members, strict=True):
        base = base_of(member.real) if not member.is_root else None
        check.unless(f"{name}._base is {check.find(base) if base is not None else None}", "views of others")
        equal(f"{name}.storage_offset()", int(member.offset))
    return _write_storages(check, named, apart) if check.memory.changes else ""


def _write_storages(check: Check, named: list[tuple[str, Tensor, Tensor]], apart: Collection[int]) -> str:
    """The same inputs share storage as when the entry was made, and no others."""
    what = "which inputs share memory"
    others = [(text, part) for text, part, real in named if id(real) not in apart]
    keys = [storage_key(part) for _, part in others]
    between = not {storage_key(part) for _, part, real in named if id(real) in apart}.isdisjoint(keys)
    if between:
        others = [(text, part) for text, part, _ in named]
        keys = [storage_key(part) for _, part in others]
    storages = ", ".join(f"{text}.untyped_storage()._cdata" for text, _ in others)
    if len(set(keys)) == len(keys) > 1:
        check.unless(f"len({{{storages}}}) == {len(keys)}", what)
    elif len(keys) > 1:
        check.script.line(f"keys = [{storages}]")
        check.unless(f"[keys.index(k) for k in keys] == {[keys.index(k) for k in keys]}", what)
        for (text, part), key in zip(others, keys, strict=True):
            if keys.count(key) > 1:
                check.equal(what, f"{text}.storage_offset()", int(part.storage_offset()))
    return "" if between else storages


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

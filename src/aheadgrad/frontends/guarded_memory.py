"""The part of a check about memory: what shares storage with what, offsets, views.

Only entries that change inputs, or that address memory themselves, care.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.recording.recording import Recording
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.subclasses import parts_of

if TYPE_CHECKING:
    from aheadgrad.frontends.guards import GuardWriter


class Memory:
    """What an entry depends on."""

    def __init__(self, captured: Recording, reals: Sequence[Tensor]) -> None:
        facts = captured.facts
        changes = any(f.data_changed or f.storage_changed for f in facts.inputs)
        self.captured = captured
        self.changes = changes and sum(len(parts_of(r)) for r in reals) > 1
        self.offsets = depends_on_offsets(captured)

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


def write_memory(writer: GuardWriter, memory: Memory, inputs: list[str]) -> None:
    """In the check of a call: the arguments' places in memory; those of the state are looked at by `find`."""
    session = memory.captured.session

    def unless(test: str) -> None:
        writer.unless(test, "memory", "as it was", "'places or sharing that are others'")

    if memory.offsets:
        for name, e in zip(inputs, session.entrances, strict=False):
            if not name.startswith("state"):
                unless(f"{name}.storage_offset() == {int(e.real.storage_offset())}")
            for part, text in zip(parts_of(e.real), writer.parts.get(id(e.real), ()), strict=False):
                unless(f"{text}.storage_offset() == {int(part.storage_offset())}")
    for entrance in session.no_views:
        unless(f"not {writer.find(entrance.real)}._is_view()")
    for name, member in zip(inputs[len(session.entrances) :], session.members, strict=False):
        base = base_of(member.real) if not member.is_root else None
        unless(f"{name}._base is {writer.find(base) if base is not None else None}")
        unless(f"{name}.storage_offset() == {int(member.offset)}")
    if memory.changes:
        _storages(writer, inputs, unless)


def _storages(writer: GuardWriter, inputs: list[str], unless: Callable[[str], None]) -> None:
    """The same inputs share storage as when the entry was made, and no others."""
    named = [(n, part) for r, name in zip(writer.reals, inputs, strict=True)
             for n, part in zip(writer.parts.get(id(r), [name]), parts_of(r), strict=True)]  # fmt: skip
    mine = {id(r) for r in writer.state}
    others = [(n, r) for n, r in named if id(r) not in mine]
    between = {storage_key(r) for r in writer.state} & {storage_key(r) for _, r in others}
    if between:
        others = named
    keys = [storage_key(r) for _, r in others]
    text = ", ".join(f"{n}.untyped_storage()._cdata" for n, _ in others)
    if len(set(keys)) == len(keys) and len(keys) > 1:
        unless(f"len({{{text}}}) == {len(keys)}")
    elif len(keys) > 1:
        writer.script.line(f"keys = [{text}]")
        unless(f"[keys.index(k) for k in keys] == {[keys.index(k) for k in keys]}")
        for (name, real), key in zip(others, keys, strict=True):
            if keys.count(key) > 1:
                unless(f"{name}.storage_offset() == {real.storage_offset()}")
    if mine and others and not between:
        unless(f"storages.isdisjoint(({text}, ))")


def depends_on_offsets(captured: Recording) -> bool:
    if captured.session.reads_offsets:
        return True
    if any(f.geometry for f in captured.facts.inputs) or captured.session.members:
        return True
    made = (*captured.facts.outputs, *captured.facts.roots)
    if any(getattr(getattr(f, "recipe", None), "geometry", None) for f in made):
        return True
    restride = torch.ops.aten.as_strided.default
    return any(r.target is restride for r in captured.session.trace.records)

"""The part of a check about memory: what shares storage with what, offsets, views.

Only entries that change inputs, or that address memory themselves, care.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aheadgrad.capture.stage import Captured
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.subclasses import parts_of

if TYPE_CHECKING:
    from aheadgrad.frontends.checks import Checks
    from aheadgrad.frontends.guards import GuardWriter


class MemoryWriter:
    def __init__(self, writer: GuardWriter, inputs: list[str]) -> None:
        self.writer = writer
        self.call = writer.call
        self.inputs = inputs
        self.captured = writer.captured
        facts = self.captured.facts
        self.changes = any(f.data_changed or f.storage_changed for f in facts.inputs)
        self.changes = self.changes and sum(len(parts_of(r)) for r in writer.reals) > 1
        self.offsets = depends_on_offsets(self.captured)

    @property
    def matters(self) -> bool:
        return self.changes or self.offsets

    def write(self) -> None:
        session = self.captured.session
        if self.offsets:
            for name, e in zip(self.inputs, session.entrances, strict=False):
                if not name.startswith("state"):
                    self._offset(name, int(e.real.storage_offset()), e.slot.describe())
                inner = zip(parts_of(e.real), self.writer.parts.get(id(e.real), ()), strict=False)
                for part, text in inner:
                    self._offset(text, int(part.storage_offset()), e.slot.describe())
        for entrance in session.no_views:
            name = self.writer._find(entrance.real)
            self.call.unless(f"not {name}._is_view()", entrance.slot.describe(), "no view", "'a view'")
        for name, member in zip(self.inputs[len(session.entrances) :], session.members, strict=False):
            base = base_of(member.real) if not member.is_root else None
            expected = self.writer._find(base) if base is not None else None
            path = member.slot.describe()
            self.call.unless(f"{name}._base is {expected}", path, "a view of the same base", "'another'")
            self._offset(name, member.offset, path)
        if self.changes:
            self._storages()

    def _offset(self, name: str, offset: int, path: str) -> None:
        now = f"{name}.storage_offset()"
        self.call.unless(f"{now} == {offset}", path, f"offset {offset}", now)

    def state_pattern(self, find: Checks) -> None:
        """In `find`: the state's own memory is as it was."""
        state = self.writer.state
        if state:
            all_of_them = "".join(f"s{k}, " for k in range(len(state)))
            is_tensor = self.writer.names.name(torch.is_tensor, "is_tensor")
            with find.fast.block(f"if not all(map({is_tensor}, ({all_of_them}))):"):
                find.miss()
            paths = {id(r): self.writer._path(i) for i, r in enumerate(self.writer.reals)}
            for k, real in enumerate(state):
                test, came = f"{is_tensor}(s{k})", f"type(s{k}).__name__"
                find.unless(test, paths[id(real)], "a tensor", came, last=True, implied=True)
        if self.offsets:
            for k, real in enumerate(state):
                test = f"s{k}.storage_offset() == {real.storage_offset()}"
                find.unless(test, "module state", f"offset {real.storage_offset()}", f"s{k}.storage_offset()")
        if self.changes and len(state) > 1:
            self._pattern(find, [f"s{k}" for k in range(len(state))], state)

    def _storages(self) -> None:
        """The same inputs share storage as when the entry was made, and no others."""
        whole = zip(self.writer.reals, self.inputs, strict=True)
        names = [n for r, name in whole for n in self.writer.parts.get(id(r), [name])]
        reals = [part for r in self.writer.reals for part in parts_of(r)]
        mine = {id(r) for r in self.writer.state}
        others = [(n, r) for n, r in zip(names, reals, strict=True) if id(r) not in mine]
        between = {storage_key(r) for r in self.writer.state} & {storage_key(r) for _, r in others}
        if between:
            self._pattern(self.call, names, reals)
            return
        if len(others) > 1:
            self._pattern(self.call, [n for n, _ in others], [r for _, r in others])
        if mine and others:
            text = ", ".join(f"{n}.untyped_storage()._cdata" for n, _ in others)
            test = f"storages.isdisjoint(({text}, ))"
            self.call.unless(test, "memory", "no argument shares memory with the module", "'one does'")

    def _pattern(self, checks: Checks, names: list[str], reals: list[Tensor]) -> None:
        keys = [storage_key(r) for r in reals]
        text = ", ".join(f"{name}.untyped_storage()._cdata" for name in names)
        if len(set(keys)) == len(keys):
            test = f"len({{{text}}}) == {len(names)}"
            checks.unless(test, "memory", "inputs that share none", "'some share memory'")
            return
        checks.line(f"keys = [{text}]")
        test = f"[keys.index(k) for k in keys] == {[keys.index(k) for k in keys]}"
        checks.unless(test, "memory", "the same inputs share memory", "'other ones do'")
        for name, real, key in zip(names, reals, keys, strict=True):
            if keys.count(key) > 1:
                now = f"{name}.storage_offset()"
                checks.unless(f"{now} == {real.storage_offset()}", "memory", "the same offsets", now)


def depends_on_offsets(captured: Captured) -> bool:
    if captured.session.reads_offsets:
        return True
    if any(f.geometry for f in captured.facts.inputs) or captured.session.members:
        return True
    made = (*captured.facts.outputs, *captured.facts.roots)
    if any(getattr(getattr(f, "recipe", None), "geometry", None) for f in made):
        return True
    restride = torch.ops.aten.as_strided.default
    return any(r.target is restride for r in captured.session.trace.records)

"""What the check of an entry is made of, whoever calls: conditions, and the names of its inputs.

Each condition gives MISS, or what else `miss` says, unless it holds. From the same lines a second function is
made that gives the reason instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from types import CellType
from typing import Any

from torch import Tensor

from aheadgrad.emit.script import Script
from aheadgrad.errors import UnsupportedInput
from aheadgrad.frontends.misses import Reason, tensor_reason
from aheadgrad.frontends.state import Place
from aheadgrad.recording.compared_values import SIMPLE, Same, describe, freeze, frozen
from aheadgrad.recording.entry_assumptions import Memory
from aheadgrad.recording.shared_entrances import whole_storage
from aheadgrad.runtime.entry import Entry
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.subclasses import parts_of


class Check:
    """Writes a check; `reals` are the entry's inputs when it was made, `where` tells how lines call them."""

    def __init__(self, entry: Entry, script: Script, miss: str) -> None:
        self.captured = entry.captured
        session = self.captured.session
        self.reals = [e.real for e in session.entrances] + [m.real for m in session.members]
        self.memory = Memory(self.captured, self.reals)
        self.script, self.names, self.miss = script, script.names, miss
        self.where: dict[int, str] = {}  # by id of a tensor
        self.parts: dict[int, list[str]] = {}  # by id of a tensor subclass: where its parts are
        self._reasons: dict[int, str] = {}  # by line: what to say where the check says MISS

    def unless(self, test: str, what: str, assumed: Any = "", now: str = "''") -> None:
        """The call fits only if the test holds; if not, `now` says what came instead of what was assumed."""
        told = assumed if isinstance(assumed, str) else describe(assumed)
        came = f"{self.names.name(describe, 'describe')}({now})"
        with self.script.block(f"if not ({test}):"):
            self.fail(f"{self.names.name(Reason, 'Reason')}({what!r}, {told!r}, {came})")

    def equal(self, what: str, text: str, value: Any) -> None:
        """For what is always of the same type."""
        sign = "is" if value is None or isinstance(value, bool) else "=="
        self.unless(f"{text} {sign} {self.names.literal(value)}", what, describe(value), text)

    def same(self, path: str, text: str, value: Any) -> None:
        """For values of the user's: of the same type and value, or the same object."""
        odd = isinstance(value, float) and (
            math.isnan(value) or value == 0.0
        )  # `==` does not tell these apart
        known = frozen(value, path)
        if value is None or isinstance(value, bool) or type(known) is Same:
            test = f"{text} is {self.names.literal(value)}"
        elif type(value) in SIMPLE and type(value) is not complex and not odd:
            kind = self.names.name(type(value), type(value).__name__)
            test = f"type({text}) is {kind} and {text} == {self.names.literal(value)}"
        else:
            test = f"{self.names.name(freeze, 'freeze')}({text}) == {self.names.name(known, 'frozen')}"
        self.unless(test, path, describe(value), text)

    def tensors(self, guards: Any, paths: list[str], given: str) -> None:
        """Tensors look as they did; torch has its own words for how they differ."""
        why = self.names.name(partial(tensor_reason, guards, paths), "tensor_reason")
        with self.script.block(f"if not {self.names.name(guards.check, 'tensors_match')}({given}):"):
            self.fail(f"{why}({given})")

    def fail(self, reason: str) -> None:
        line = f"return {self.miss}"
        self.script.line(line)
        self._reasons[len(self.script.lines) - 1] = self.script.lines[-1].replace(line, f"return {reason}")

    def why(self) -> Script:
        """The lines so far, with reasons."""
        twin = Script("why", self.names)
        twin.lines = [self._reasons.get(i, line) for i, line in enumerate(self.script.lines)]
        return twin

    def find(self, real: Tensor) -> str:
        """How the check calls an input; one that it has not met yet is reached from others."""
        known = self.where.get(id(real))
        if known is not None:
            return known
        session = self.captured.session
        owner = next((m.real for m in session.members if base_of(m.real) is real), None)
        if id(real) in session.made_owners:
            one = self.find(session.made_owners[id(real)])
            text = f"{self.names.name(whole_storage, 'whole_storage')}({one})"
        elif owner is not None:
            text = f"{self.find(owner)}._base"
        else:
            text = self.outside(real)
        name = self.where[id(real)] = f"x{len(self.where)}"
        self.script.line(f"{name} = {text}")
        return name

    def outside(self, real: Tensor) -> str:
        """A tensor that was given to nobody: one that the function holds by itself."""
        if isinstance(real, FakeTensor):
            raise UnsupportedInput("The graph uses a fake tensor that is not among its inputs.")
        return self.names.name(real, "closed_over")

    def text_of(self, place: Place) -> str:
        holder = self.names.name(place.holder, "holder")
        if isinstance(place.holder, CellType):
            return f"{holder}.cell_contents"
        return f"{holder}.get({place.key!r})"

    def write_memory(self, inputs: list[str], apart: Collection[int]) -> str:
        """In the check of a call: where inputs lie, and which of them share memory.

        Those in `apart` (by id) are checked elsewhere, unless they share memory with others. The names of the
        others are given back, if that matters.
        """
        session, memory = self.captured.session, self.memory
        named = [
            (text, part, id(real) in apart)
            for name, real in zip(inputs, self.reals, strict=True)
            for text, part in zip(self.parts.get(id(real), [name]), parts_of(real), strict=True)
        ]
        what = "places in memory"
        for name, member in zip(inputs[len(session.entrances) :], session.members, strict=True):
            base = base_of(member.real) if not member.is_root else None
            self.unless(f"{name}._base is {self.find(base) if base is not None else None}", what)
        if not memory.matters:
            return ""
        keys = [{storage_key(part) for _, part, away in named if away is side} for side in (True, False)]
        together = memory.changes and not keys[0].isdisjoint(keys[1])
        others = [(text, part) for text, part, away in named if together or not away]
        texts = "".join(f"{text}, " for text, _ in others)
        pattern = self.names.name(memory.pattern, "pattern")
        known = self.names.name(memory.pattern([part for _, part in others]), "known")
        if others:
            self.unless(f"{pattern}(({texts})) == {known}", what)
        return "" if together or not memory.changes else texts

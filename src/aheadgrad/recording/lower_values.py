"""The end of a recording: what was traced becomes values.

Every traced tensor gets a number and a type, every record an op. Lowering is done in steps: what a later
request records is added to what was lowered before, and keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad.program.doors import type_of
from aheadgrad.program.names import Naming, base_name
from aheadgrad.program.tape import Tape
from aheadgrad.program.values import FreshCopy, Op, Value
from aheadgrad.recording.records import Record, Trace
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import Bundle, Form
from aheadgrad.torchlayer.symbols import Shape, frozen_number, frozen_numbers, is_symbolic


class Lowering:
    """The values of one trace. `copies`: inputs that graphs copy first, and with which op."""

    def __init__(self, trace: Trace, *, parts_first: bool, copies: Iterable[tuple[Tensor, Any]] = ()) -> None:
        self.trace = trace
        self.parts_first = parts_first
        self.naming = Naming()
        self.ops: list[Op] = []
        self._values: dict[int, Value] = {}  # by id of the traced tensor
        self._traced: list[Tensor] = []  # by number
        self._keys: dict[Any, int] = {}
        self._kept: list[Any] = []
        self.copies = {
            value: FreshCopy(value, target, self.naming.fresh(base_name(target)))
            for value, target in ((self.value(t), target) for t, target in copies)
        }

    def tape(self) -> Tape:
        """All that was recorded by now."""
        self._lower_records()
        trace = self.trace
        makers = {symbol: tuple(made) for symbol, made in trace.numbers.items()}
        return Tape(
            tuple(self.ops), trace.settled, makers, trace.sized, self.naming, self.copies, self.parts_first
        )

    def mark(self) -> tuple[int, int]:
        """Where the recording stands, to go back to."""
        return len(self.trace.records), len(self._traced)

    def forget(self, mark: tuple[int, int]) -> None:
        """Forgets all that was recorded since."""
        records, traced = mark
        self.trace.rewind(records)
        del self.ops[records:]
        for t in self._traced[traced:]:
            known = self._values.get(id(t))
            if known is not None and known.number >= traced:
                del self._values[id(t)]
        del self._traced[traced:]

    def take_over(self, known: Mapping[int, Value], tape: Tape) -> None:
        """Goes on with the values (by number) and the names of an equal tape, which was loaded."""
        self._values = {key: known.get(v.number, v) for key, v in self._values.items()}
        self.ops[:] = tape.ops
        self.naming, self.copies = tape.naming, dict(tape.copies)

    def traced(self, value: Value) -> Tensor:
        """The traced tensor that a value stands for."""
        return self._traced[value.number]

    def known(self, traced: Any) -> Value | None:
        return self._values.get(id(traced))

    def value(self, traced: Tensor) -> Value:
        """The value of a traced tensor, which is an input if nothing made it."""
        known = self._values.get(id(traced))
        return self._new(traced) if known is None else known

    def _new(self, traced: Tensor, name: str = "", op: int | None = None, part: int | None = None) -> Value:
        made = Value(len(self._traced), type_of(traced), name, op, part)
        self._traced.append(traced)
        self._values.setdefault(id(traced), made)
        return made

    def key(self, thing: Any) -> int:
        """A number that tells a live object from others."""
        self._kept.append(thing)
        return self._keys.setdefault(("object", id(thing)), len(self._keys))

    def memory(self, key: Any) -> int:
        """A number that tells the memory known by a key from others."""
        return self._keys.setdefault(("memory", key), len(self._keys))

    def frozen(self, value: Any) -> Any:
        """Anything made of traced tensors and symbolic numbers, as values."""
        if len(self.ops) < len(self.trace.records):
            self._lower_records()
        if isinstance(value, Tensor):
            return self.value(value) if isinstance(value, FakeTensor) else value
        if type(value) is Bundle:
            return Bundle(frozen_numbers_in(value.form), tuple(self.value(p) for p in value.parts))
        if isinstance(value, torch.Size):
            return list(frozen_numbers(value))
        if type(value) in (list, tuple):
            return type(value)(self.frozen(v) for v in value)
        return _number(value)

    def _lower_records(self) -> None:
        """Results that are taken again as views when they are read off are named last."""
        trace = self.trace
        start = len(self.ops)
        new = list(enumerate(trace.records))[start:]
        late = {i: 2 for i, r in new if r.phase != "forward" and i >= trace.read_off}
        late.update({i: 1 for i, r in new if r.phase == "forward" and i >= trace.settled})
        names: dict[int, Any] = {}
        for i, record in sorted(new, key=lambda pair: (late.get(pair[0], 0), pair[0])) if late else new:
            name = self.naming.fresh(base_name(record.target))
            several = isinstance(record.out, list | tuple)
            parts = [self.naming.fresh("getitem") for _ in record.out] if several else []
            names[i] = name, parts
        for i, record in new:
            self.ops.append(self._lower(record, i, *names[i]))

    def _lower(self, record: Record, index: int, name: str, parts: list[str]) -> Op:
        uses: list[Value] = []
        args = tuple(self._argument(a, uses) for a in record.args)
        kwargs = {k: self._argument(v, uses) for k, v in record.kwargs.items()} if record.kwargs else {}
        out: Any = record.out
        if isinstance(out, Tensor):
            out = self._new(out, name, index)
        elif isinstance(out, list | tuple):
            out = tuple(
                self._new(v, part, index, k) if isinstance(v, Tensor) else _number(v)
                for k, (v, part) in enumerate(zip(out, parts, strict=True))
            )
        out = _number(out)
        told = record.phase, record.keep, record.origin, record.node, record.meta, record.region
        return Op(record.target, args, kwargs, out, tuple(uses), name, *told)

    def _argument(self, value: Any, uses: list[Value]) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self.trace.constants:
                return value
            used = self.value(value)
            uses.append(used)
            return used
        if isinstance(value, torch.Size):
            return [self._argument(v, uses) for v in value]
        if isinstance(value, list | tuple):
            return type(value)(self._argument(v, uses) for v in value)
        if isinstance(value, dict):
            return {k: self._argument(v, uses) for k, v in value.items()}
        return _number(value)


def _number(value: Any) -> Any:
    return frozen_number(value) if is_symbolic(value) else value


def frozen_numbers_in(value: Any) -> Any:
    """Facts, forms and whatever they are made of, with symbolic numbers as values."""
    if is_symbolic(value):
        return frozen_number(value)
    if isinstance(value, torch.Size):
        return Shape(frozen_numbers(value)) if any(map(is_symbolic, value)) else value
    if type(value) in (list, tuple):
        return type(value)(frozen_numbers_in(v) for v in value)
    if type(value) is dict:
        return {k: frozen_numbers_in(v) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for f in fields(value):
            if f.init and not (isinstance(value, Form) and f.name == "meta"):
                now = getattr(value, f.name)
                new = frozen_numbers_in(now)
                if new is not now:
                    changed[f.name] = new
        return replace(value, **changed) if changed else value
    return value

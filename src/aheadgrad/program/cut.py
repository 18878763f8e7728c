"""Cutting a program out of a tape: from these inputs to these outputs, and nothing else.

Cutter(tape).cut("forward", [Port(slot, value, "primals_1")], [(slot, value)])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aheadgrad.program.on_demand import on_demand
from aheadgrad.program.program import Program
from aheadgrad.program.random import drawn_with, replayed
from aheadgrad.program.rooms import is_seen, without_rooms
from aheadgrad.program.slots import RandomState, Saved, Slot, Tangent
from aheadgrad.program.tape import Tape
from aheadgrad.program.values import Op, Port, Shown, Value, Write, Written, map_leaves, numbers_in
from aheadgrad.torchlayer.symbols import Number, UnknownSize, is_symbolic, with_numbers

Sizes = Mapping[Any, int | float]
NO_SIZES: Sizes = {}


@dataclass(eq=False)
class Needs:
    """What the walk from outputs back to inputs has found, and has still to look at."""

    given: set[Any]
    wanted: set[int] = field(default_factory=set)
    touched: set[Value] = field(default_factory=set)
    stack: list[Value] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)  # by symbol: the first op that needs it


class Cutter:
    """Cuts programs out of one tape. `sizes`: what symbols stand for, if the program is for these only."""

    def __init__(self, tape: Tape, *, sizes: Sizes | None = None, same: Mapping[Value, Value] | None = None):
        self.tape = tape
        self.sizes = sizes or NO_SIZES
        self.same = same or {}

    def source(self, value: Value) -> Value:
        """What a value is called in programs."""
        while True:
            found = self.tape.source(self.same.get(value, value))
            if found is value:
                return found
            value = found

    def needed(
        self,
        outputs: Iterable[Any],
        boundary: set[Value],
        phases: set[str] | None = None,
        given: Iterable[Any] = (),
    ) -> tuple[set[int], set[Value]]:
        """Numbers of the ops that the outputs need, and the values they take from the boundary.

        `given` are symbols that need not be made.
        """
        tape, outputs = self.tape, list(outputs)
        needs = Needs({*given, *self.sizes})
        needs.stack += [v for v in outputs if type(v) is Value]
        if phases is not None:
            for i, op in enumerate(tape.ops):
                if op.keep and op.phase in phases:
                    self._want(i, needs)
        self._need([v for v in outputs if type(v) is not Value], len(tape.ops), needs)
        while needs.stack or needs.numbers:
            if not needs.stack:
                symbol, user = needs.numbers.popitem()
                if not any(i in needs.wanted and i < user for i in tape.makers[symbol]):
                    self._want(tape.maker(symbol, phases), needs)
                continue
            value = self.source(needs.stack.pop())
            if value in boundary or value.op is None:
                needs.touched.add(value)
            elif value.op not in needs.wanted:
                self._want(value.op, needs)
        return needs.wanted, needs.touched

    def _want(self, index: int, needs: Needs) -> None:
        op = self.tape.ops[index]
        needs.wanted.add(index)
        needs.stack += op.uses
        self._need((op.args, op.kwargs), index, needs)

    def _need(self, values: Any, user: int, needs: Needs) -> None:
        for symbol in self.made_numbers(values) - needs.given:
            needs.numbers[symbol] = min(user, needs.numbers.get(symbol, user))

    def made_numbers(self, values: Any) -> set[Any]:
        """Symbols among these numbers that ops make: `x.item()`, the size of `x[mask]`."""
        makers = self.tape.makers
        if not makers:
            return set()
        return {s for n in numbers_in(values) for s in n.expr.free_symbols if s in makers}

    def cut(
        self,
        role: str,
        inputs: Sequence[Port],
        outputs: Sequence[tuple[Slot, Any]],
        phases: set[str] | None = None,
        writes: Sequence[Write] = (),
        *,
        late: bool = False,
    ) -> Program:
        """`late`: ops of another phase run again, each when its result is needed."""
        tape = self.tape
        boundary = {p.value for p in inputs if type(p.value) is Value}
        given = {p.value.expr for p in inputs if type(p.value) is Number}
        if tape.makers:
            given |= {n.expr for p in inputs if tells(p, role) for _, _, n in p.value.type.shown()}
        roots = [*(v for _, v in outputs), *(w.new for w in writes)]
        wanted, touched = self.needed(roots, boundary, phases, given)
        build = _Build(self, role, inputs, touched)
        drawn = {v.op: v for slot, v in outputs if isinstance(slot, RandomState)}
        again = {p.value.op: p.value for p in inputs if isinstance(p.slot, RandomState)}
        due = self._due(writes)
        order = sorted(wanted)
        if late:
            arriving = [p.value for p in inputs if isinstance(p.slot, Tangent) and type(p.value) is Value]
            order = on_demand(tape, wanted, arriving, self.source)
        for i in order:
            while due and due[0][0] <= i:
                build.write(due.pop(0)[1])
            op = tape.ops[i]
            if i in again:
                op = replayed(op, again[i])
            build.add(drawn_with(op, drawn[i]) if i in drawn else op)
        for _, write in due:
            build.write(write)
        slots, results = [slot for slot, _ in outputs], [build.result(v) for _, v in outputs]
        seen = {v for slot, v in zip(slots, results, strict=True) if type(v) is Value and is_seen(slot)}
        ops, results = without_rooms(tuple(build.ops), results, seen)
        leaving = tuple(zip(slots, results, strict=True))
        return Program(role, tuple(inputs), ops, leaving, tape.naming, tape.parts_first)

    def _due(self, writes: Sequence[Write]) -> list[tuple[int, Write]]:
        """Each write with the number of the op before which it stands.

        That is where the user's function ended; what was recorded since are views of results.
        """
        found: list[tuple[int, Write]] = []
        for write in writes:
            made = self.source(write.new).op
            ready = 0 if made is None else made + 1
            found.append((max(self.tape.settled, ready, found[-1][0] if found else 0), write))
        return found


def tells(port: Port, role: str) -> bool:
    """May sizes be read off this input? The forward of a joint graph must not read them off tangents."""
    tangent = isinstance(port.slot, Tangent) and role == "joint"
    return type(port.value) is Value and not tangent


class _Build:
    """The ops of one program: arguments by the names that values have in it, sizes read where needed."""

    def __init__(self, cutter: Cutter, role: str, inputs: Sequence[Port], touched: set[Value]) -> None:
        self.cutter = cutter
        self.tape = cutter.tape
        self.ops: list[Op] = []
        self.there: set[Value] = set()
        self.known: set[Any] = set()  # expressions that are at hand as numbers
        self.sources: dict[Any, tuple[Value, Shown]] = {}  # ... and that can be read off a tensor
        self.renamed: dict[Value, Value] = {}
        self.written: dict[Value, Value] = {}
        for port in inputs:
            if type(port.value) is Value:
                self.there.add(port.value)
                if tells(port, role):
                    self._learn(port.value, strides=not isinstance(port.slot, Saved | Tangent))
            elif type(port.value) is Number:
                self.known.add(port.value.expr)
        for port in inputs:
            copy = self.tape.copies.get(port.value) if type(port.value) is Value else None
            if copy is not None and port.value in touched and not port.name.startswith(copy.name):
                args = (port.value, *self._arguments(copy.args))
                self._append(
                    Op(copy.target, args, {}, self._new(port.value, copy.name), (port.value,), copy.name)
                )
                self.renamed[port.value] = self.ops[-1].out

    def _new(self, like: Value, name: str) -> Value:
        return Value(-1 - len(self.ops), like.type, name)

    def _learn(self, value: Value, *, strides: bool = False) -> None:
        if self.tape.sized:
            for shown in value.type.shown(strides=strides):
                self.sources.setdefault(shown[2].expr, (value, shown))

    def add(self, op: Op) -> None:
        changed = any(self._place(v) is not v for v in op.uses)
        if changed or self.tape.sized:
            op = op.mapped(self._leaf)
        self._append(op)

    def _append(self, op: Op) -> None:
        self.ops.append(op)
        for out in op.outs:
            if type(out) is Value:
                self.there.add(out)
                self._learn(out)
            elif type(out) is Number:
                self.known.add(out.expr)

    def write(self, write: Write) -> None:
        place, new = self._place(write.value), self._place(write.new)
        name = self.tape.naming.of_write(write.value, write.target)
        made = self.tape.of(self.cutter.source(write.new))
        told: Any = (None, None, None) if made is None else (made.origin, made.node, made.meta)
        out = self._new(write.value, name)
        self._append(Op(write.target, (place, new), {}, out, (place, new), name, "write", True, *told))
        self.written[write.value] = out

    def _place(self, value: Value) -> Value:
        value = self.cutter.source(value)
        value = self.renamed.get(value, value)
        if value not in self.there:
            raise AssertionError(f"a value in the trace has no origin: {value}")
        return value

    def _arguments(self, args: Any) -> Any:
        return map_leaves(args, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if type(value) is Value:
            return self._place(value)
        if self.cutter.sizes:
            value = with_numbers(value, self.cutter.sizes)
        if type(value) is Number:
            self._provide(value.expr)
        return value

    def _provide(self, expr: Any) -> None:
        """Makes a number's symbols known: each is an input, is made by an op, or is read off a tensor."""
        if expr in self.known or expr.is_number:
            return
        if expr in self.sources:
            self.known.add(expr)
            value, (target, further, number) = self.sources[expr]
            name = self.tape.naming.of_size(expr, target)
            self._append(Op(target, (value, *further), {}, number, (value,), name))
            return
        if expr.is_Symbol:
            raise UnknownSize(f"no input of this program provides the size {expr}")
        for symbol in sorted(expr.free_symbols, key=str):
            self._provide(symbol)

    def result(self, value: Any) -> Any:
        if isinstance(value, Written):
            return self.written[value.value]
        if type(value) is Value and value in self.there:  # a user's own detach is returned as it is
            return self.renamed.get(value, value)
        return self._arguments(value) if not is_symbolic(value) or type(value) is Number else value

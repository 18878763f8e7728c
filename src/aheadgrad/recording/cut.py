"""Cutting a program out of a trace: from these inputs to these outputs, and nothing else.

    cutter.cut("forward", [Port(slot, value, "primals_1")], [(slot, value)])

Names are those that FX would have given to the ops in the order in which they ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.program.program import Program
from aheadgrad.program.slots import Signature, Slot
from aheadgrad.recording.build import Builder, base_name, tells
from aheadgrad.recording.placed import is_seen, without_rooms
from aheadgrad.recording.ports import FreshCopy, Port, Write
from aheadgrad.recording.trace import Trace
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.fxnames import Names
from aheadgrad.torchlayer.symbols import expression, is_symbolic, places, symbols_of_numbers

_DETACH = torch.ops.aten.detach.default


class Cutter:
    """Cuts programs out of one trace; names are given once, in the order in which ops ran."""

    def __init__(
        self,
        trace: Trace,
        copies: Iterable[tuple[Tensor, Any]] = (),
        *,
        sized: bool = False,
        parts_first: bool = False,
    ) -> None:
        self.trace = trace
        self._sized = sized
        self.parts_first = parts_first  # parts of a result stand right after the op, used or not yet
        self.names = Names()
        self.named = 0
        self.copies = {
            id(value): FreshCopy(value, target, self.names.fresh(target.overloadpacket.__name__))
            for value, target in copies
        }
        self.same: dict[int, Tensor] = {}  # by id, other values that these are the same as
        self.write_names: dict[int, str] = {}
        self.symbol_names: dict[Any, str] = {}

    @property
    def sized(self) -> bool:
        """Are there symbolic sizes? They may turn up late, in a backward."""
        return self._sized or self.trace.sized

    def symbol_name(self, expr: Any, op: Any) -> str:
        """What a size is called in all graphs; `op` reads it off a tensor."""
        known = self.symbol_names.get(expr)
        if known is None:
            known = self.symbol_names[expr] = self.names.fresh(op.name().removeprefix("aten::"))
        return known

    def name_records(self) -> None:
        """Results that are taken again as views when they are read off are named last."""
        trace = self.trace
        new = list(enumerate(trace.records))[self.named :]
        results = {i for i, r in new if r.phase == "forward" and i >= trace.settled}
        gradients = {i for i, r in new if r.phase != "forward" and i >= trace.read_off}
        for _, record in sorted(new, key=lambda pair: (pair[0] in gradients, pair[0] in results, pair[0])):
            record.name = self.names.fresh(base_name(record.target))
            if isinstance(record.out, list | tuple):
                names = [self.names.fresh("getitem") for _ in record.out]
                record.part_names = {k: names[k] for k, v in enumerate(record.out) if isinstance(v, Tensor)}
        self.named = len(self.trace.records)

    def source(self, value: Tensor) -> Tensor:
        """Looks through detach ops that autograd adds while it records a backward."""
        while True:
            value = self.same.get(id(value), value)
            made = self.trace.producer(value)
            if made is None:
                return value
            record = self.trace.records[made.record]
            if record.target is not _DETACH or record.phase == "forward":
                return value
            value = record.args[0]

    @contextmanager
    def merging_views(self, given: set[int]) -> Iterator[None]:
        """Views taken more than once count as one: functionalization takes them again at will.

        They become the one in `given` (ids of values that a program is given), or the first.
        """
        views: dict[Any, list[Tensor]] = {}
        first: dict[int, int] = {}
        for record in self.trace.records:
            if not isinstance(record.out, Tensor) or not is_view_op(record.target):
                continue
            of = id(self.source(record.args[0]))
            key = (record.target, first.get(of, of), repr(record.args[1:]), repr(record.kwargs))
            same = views.setdefault(key, [])
            same.append(record.out)
            first[id(record.out)] = id(same[0])
        for same in views.values():
            if len(same) > 1:
                one = next((v for v in same if id(v) in given), same[0])
                self.same.update((id(v), one) for v in same if v is not one)
        try:
            yield
        finally:
            self.same = {}

    def needed(
        self,
        outputs: Iterable[Any],
        boundary: set[int],
        phases: set[str] | None = None,
        given: set[Any] = frozenset(),  # type: ignore[assignment]
    ) -> tuple[set[int], set[int]]:
        """Records needed for the outputs, and ids of the values they take from the boundary.

        `given` are symbols of numbers that need not be made.
        """
        outputs = list(outputs)
        wanted: set[int] = set()
        touched: set[int] = set()
        stack: list[Tensor] = [v for v in outputs if isinstance(v, Tensor)]
        numbers: dict[Any, int] = {}  # by symbol: the first record that needs it
        if phases is not None:
            for i, record in enumerate(self.trace.records):
                if record.keep and record.phase in phases:
                    wanted.add(i)
                    stack.extend(record.tensors())
                    self._need((record.args, record.kwargs), i, numbers, given)
        self._need([v for v in outputs if not isinstance(v, Tensor)], len(self.trace.records), numbers, given)
        while stack or numbers:
            if not stack:
                symbol, user = numbers.popitem()
                if not any(i in wanted and i < user for i in self.trace.numbers[symbol]):
                    self._want(self.trace.maker(symbol, phases), wanted, stack, numbers, given)
                continue
            value = self.source(stack.pop())
            if id(value) in boundary:
                touched.add(id(value))
                continue
            made = self.trace.producer(value)
            if made is None:
                touched.add(id(value))
            elif made.record not in wanted:
                self._want(made.record, wanted, stack, numbers, given)
        return wanted, touched

    def _want(
        self, index: int, wanted: set[int], stack: list[Tensor], numbers: dict[Any, int], given: set[Any]
    ) -> None:
        record = self.trace.records[index]
        wanted.add(index)
        stack.extend(record.tensors())
        self._need((record.args, record.kwargs), index, numbers, given)

    def _need(self, values: Any, user: int, numbers: dict[Any, int], given: set[Any]) -> None:
        for symbol in self.made_numbers(values) - given:
            numbers[symbol] = min(user, numbers.get(symbol, user))

    def made_numbers(self, values: Any) -> set[Any]:
        """Symbols among these numbers that records make: `x.item()`, the size of `x[mask]`."""
        if not self.trace.numbers:
            return set()
        return {s for s in symbols_of_numbers(values) if s in self.trace.numbers}

    def value_name(self, value: Any) -> str | None:
        made = self.trace.producer(value)
        if made is None:
            copy = self.copies.get(id(value))
            return copy.name if copy else None
        record = self.trace.records[made.record]
        return record.name if made.part is None else record.part_names[made.part]

    def cut(
        self,
        role: str,
        inputs: list[Port],
        outputs: list[tuple[Slot, Any]],
        phases: set[str] | None = None,
        writes: Sequence[Write] = (),
    ) -> Program:
        self.name_records()
        boundary = {id(p.value) for p in inputs if isinstance(p.value, Tensor)}
        roots = [*(v for _, v in outputs), *(w.new for w in writes)]
        given = {expression(p.value) for p in inputs if is_symbolic(p.value)}
        if self.trace.numbers:
            given |= {expression(n) for p in inputs if tells(p, role) for _, _, n in places(p.value)}
        wanted, touched = self.needed(roots, boundary, phases, given)
        build = Builder(self, role)
        build.place_inputs(inputs, touched)
        if self.parts_first:
            used = [t for i in wanted for t in self.trace.records[i].tensors()]
            build.used = {id(self.source(t)) for t in [*used, *roots] if isinstance(t, Tensor)}
        due = self._due(writes)
        for i in sorted(wanted):
            while due and due[0][0] <= i:
                build.write(due.pop(0)[1])
            build.record(self.trace.records[i], i)
        for _, write in due:
            build.write(write)
        build.graph.output(tuple(build.result(v) for _, v in outputs))
        build.graph.output_node().meta["val"] = tuple(
            v.meta.get("val") if isinstance(v, fx.Node) else v
            for v in build.graph.output_node().args[0]  # type: ignore[union-attr]
        )
        signature = Signature(tuple(p.slot for p in inputs), tuple(slot for slot, _ in outputs))
        made = Program(role, build.graph, signature, build.constants)
        without_rooms(made.graph, [r for r, (s, _) in zip(made.results, outputs, strict=True) if is_seen(s)])
        return made

    def _due(self, writes: Sequence[Write]) -> list[tuple[int, Write]]:
        """Each write with the index of the record before which it stands.

        That is where the user's function ended; what was recorded since are views of results.
        """
        found: list[tuple[int, Write]] = []
        for write in writes:
            made = self.trace.producer(self.source(write.new))
            ready = 0 if made is None else made.record + 1
            found.append((max(self.trace.settled, ready, found[-1][0] if found else 0), write))
        return found

    def write_name(self, write: Write) -> str:
        known = self.write_names.get(id(write.value))
        if known is None:
            known = self.write_names[id(write.value)] = self.names.fresh(base_name(write.target))
        return known

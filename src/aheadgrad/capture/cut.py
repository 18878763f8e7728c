"""Cutting a program out of a trace: from these inputs to these outputs, and nothing else.

    cutter.cut("forward", [Port(slot, value, "primals_1")], [(slot, value)])

Names are those that FX would have given to the ops in the order in which they ran.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.capture.trace import Made, Record, Trace
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Signature, Slot, Tangent
from aheadgrad.torchlayer.dispatch import OpOverload, is_view_op
from aheadgrad.torchlayer.fxnames import Names
from aheadgrad.torchlayer.symbols import SymbolNodes, expression, is_symbolic, places, symbols_of_numbers

_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True, eq=False)
class Port:
    """A placeholder: its meaning, the traced value it stands for, its name."""

    slot: Slot
    value: Any
    name: str


@dataclass(frozen=True, eq=False)
class FreshCopy:
    """Uses of an input go through a copy of it (`clone`) or an alias (`view`)."""

    value: Tensor
    target: Any
    name: str

    @property
    def args(self) -> tuple[Any, ...]:
        return (list(self.value.shape),) if self.target is torch.ops.aten.view.default else ()


@dataclass(frozen=True, eq=False)
class Write:
    """An input's update kept inside the graph: `target(value, new)` after all that reads the old value."""

    target: Any
    value: Tensor
    new: Tensor


@dataclass(frozen=True, eq=False)
class Written:
    """As an output: the input after the write that the graph makes."""

    value: Tensor


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
            record.name = self.names.fresh(_base_name(record.target))
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
            given |= {expression(n) for p in inputs if _tells(p, role) for _, _, n in places(p.value)}
        wanted, touched = self.needed(roots, boundary, phases, given)
        build = _Builder(self, role)
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
        return Program(role, build.graph, signature, build.constants)

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
            known = self.write_names[id(write.value)] = self.names.fresh(_base_name(write.target))
        return known


class _Builder:
    """Makes FX nodes for one program."""

    def __init__(self, cutter: Cutter, role: str) -> None:
        self.cutter = cutter
        self.role = role
        self.graph = fx.Graph()
        self.env: dict[int, fx.Node] = {}
        self.whole: dict[int, fx.Node] = {}
        self.written: dict[int, fx.Node] = {}
        self.used: set[int] = set()
        self.constants: dict[str, Any] = {}
        self.symbols = SymbolNodes(self.graph, cutter.symbol_name, cutter.names.fresh, on=cutter.sized)

    def place_inputs(self, inputs: list[Port], touched: set[int]) -> None:
        for port in inputs:
            node = self.graph.placeholder(port.name)
            node.meta["val"] = port.value
            if isinstance(port.value, Tensor):
                self.env.setdefault(id(port.value), node)  # tangents share what makes them of one shape
                if _tells(port, self.role):
                    self.symbols.learn_tensor(port.value, node)
            else:
                self.symbols.learn_number(port.value, node)
        for port in inputs:
            copy = self.cutter.copies.get(id(port.value))
            if copy is not None and id(port.value) in touched and not port.name.startswith(copy.name):
                node = self.graph.create_node(
                    "call_function",
                    copy.target,
                    (self.env[id(port.value)], *self._argument(copy.args)),
                    name=copy.name,
                )
                node.meta["val"] = port.value
                self.env[id(port.value)] = node

    def record(self, record: Record, index: int) -> None:
        args = self._argument(record.args)
        kwargs = {k: self._argument(v) for k, v in record.kwargs.items()}
        node = self.graph.create_node("call_function", record.target, args, kwargs, name=record.name)
        node.meta["val"] = record.out
        _describe(node, record)
        if isinstance(record.out, Tensor):
            self.env.setdefault(id(record.out), node)
            self.symbols.learn_tensor(record.out, node)
        elif is_symbolic(record.out):
            self.symbols.learn_number(record.out, node)
        else:
            self.whole[id(record)] = node
            for part in record.out if self.symbols.on and record.out is not None else ():
                if isinstance(part, Tensor):
                    self.symbols.learn_tensor(part, functools.partial(self._node_of, part))
            for part in record.part_names if self.used else ():
                if id(record.out[part]) in self.used and id(record.out[part]) not in self.env:
                    self._part(record.out[part], Made(index, part))

    def write(self, write: Write) -> None:
        new = self._node_of(write.new)
        place = self.env[id(write.value)]
        name = self.cutter.write_name(write)
        node = self.graph.create_node("call_function", write.target, (place, new), name=name)
        node.meta["val"] = write.value
        made = self.cutter.trace.producer(self.cutter.source(write.new))
        if made is not None:
            _describe(node, self.cutter.trace.records[made.record])
        node.meta["partitioner_tag"] = "must_be_in_forward"
        self.written[id(write.value)] = node

    def _node_of(self, value: Tensor) -> fx.Node:
        value = self.cutter.source(value)
        node = self.env.get(id(value))
        if node is not None:
            return node
        made = self.cutter.trace.producer(value)
        if made is None:
            return self._constant(value)
        return self._part(value, made)

    def _part(self, value: Tensor, made: Made) -> fx.Node:
        record = self.cutter.trace.records[made.record]
        assert made.part is not None
        node = self.graph.create_node(
            "call_function",
            operator.getitem,
            (self.whole[id(record)], made.part),
            name=record.part_names[made.part],
        )
        node.meta["val"] = value
        _describe(node, record)
        self.env[id(value)] = node
        self.symbols.learn_tensor(value, node)
        return node

    def _constant(self, value: Tensor) -> fx.Node:
        if id(value) not in self.cutter.trace.constants:
            raise AssertionError(f"a value in the trace has no origin: {value}")
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.create_node("get_attr", name, name=name)
        node.meta["val"] = value
        self.env[id(value)] = node
        return node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return type(value)(self._argument(v) for v in value)
        if isinstance(value, torch.Size):
            return [self._argument(v) for v in value]
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        if is_symbolic(value):
            return self.symbols.node(value)
        if isinstance(value, fx.GraphModule | torch.Generator):
            return self._attribute(value)
        return value

    def _attribute(self, value: Any) -> fx.Node:
        name = f"_constant{len(self.constants)}"
        self.constants[name] = value
        return self.graph.create_node("get_attr", name, name=name)

    def result(self, value: Any) -> Any:
        if isinstance(value, Written):
            return self.written[id(value.value)]
        if isinstance(value, Tensor):
            node = self.env.get(id(value))  # a user's own detach is returned as it is
            return node if node is not None else self._node_of(value)
        return self._argument(value)


def _tells(port: Port, role: str) -> bool:
    """May sizes be read off this input? The forward of a joint graph must not read them off tangents."""
    tangent = isinstance(port.slot, Tangent) and role == "joint"
    return isinstance(port.value, Tensor) and not tangent


def _base_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))


def _describe(node: fx.Node, record: Record) -> None:
    node.meta["partitioner_tag"] = "is_forward" if record.phase == "forward" else "is_backward"
    if record.meta:
        node.meta.update(record.meta)
    if record.node is not None:
        node.meta["autograd_node"] = record.node
        node.meta["phase"] = record.phase
    origin = record.origin
    if origin is not None:
        node.meta["origin"] = origin
        if "stack_trace" not in node.meta:
            node.meta["stack_trace"] = origin.as_traceback()

"""FX nodes for one program: what a `Cutter` has chosen, as a graph."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from aheadgrad.program.slots import Tangent
from aheadgrad.recording.ports import Port, Write, Written
from aheadgrad.recording.trace import Made, Record
from aheadgrad.torchlayer.dispatch import OpOverload
from aheadgrad.torchlayer.symbols import SymbolNodes, is_symbolic

if TYPE_CHECKING:
    from aheadgrad.recording.cut import Cutter


class Builder:
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
                if tells(port, self.role):
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


def tells(port: Port, role: str) -> bool:
    """May sizes be read off this input? The forward of a joint graph must not read them off tangents."""
    tangent = isinstance(port.slot, Tangent) and role == "joint"
    return isinstance(port.value, Tensor) and not tangent


def base_name(target: Any) -> str:
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

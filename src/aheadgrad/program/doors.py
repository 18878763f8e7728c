"""The doors to FX: a program as a graph module for others, and a graph module of others as a program.

A graph that goes out is a private copy: its nodes have fake tensors of their own in `meta["val"]`, which
nobody else holds. Placeholders and names are those that every backend of PyTorch knows (`primals_1`,
`mul_3`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.errors import InvalidProgram
from aheadgrad.program.cut import Cutter
from aheadgrad.program.effects import has_effect
from aheadgrad.program.names import Naming
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Slot, UserInput, UserOutput
from aheadgrad.program.tape import Tape
from aheadgrad.program.values import Op, Port, TensorType, Value, values_in
from aheadgrad.torchlayer.fake import Fakes, FakeTensor, FakeTensorMode
from aheadgrad.torchlayer.fxcode import module_with
from aheadgrad.torchlayer.replay import Drawn, Replayed, as_operator
from aheadgrad.torchlayer.symbols import Number, SymbolNodes, frozen_number, frozen_numbers, is_symbolic
from aheadgrad.torchlayer.unbacked import Bindings, sizes_from_values

_TAGS = {"forward": "is_forward", "write": "must_be_in_forward"}


def module_of(
    program: Program, mode: FakeTensorMode | None = None, known: Mapping[Value, Any] | None = None
) -> fx.GraphModule:
    """A program as an FX module, with fake tensors that are known, or of the given mode (or a new one)."""
    if program.made is not None:
        return program.made
    build = _Graph(program, Fakes(mode, _numbers(program)))
    build.vals.update(known or {})
    build.fill()
    root = torch.nn.Module()
    for name, value in build.constants.items():
        if isinstance(value, Tensor):
            root.register_buffer(name, value, persistent=False)
        else:
            setattr(root, name, value)
    return module_with(root, build.graph)


def example_inputs(module: fx.GraphModule) -> list[Any]:
    """What its placeholders stand for: fake tensors, symbolic numbers."""
    return [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]


def _numbers(program: Program) -> list[Number]:
    found = [p.value for p in program.inputs if type(p.value) is Number]
    values = [p.value for p in program.inputs if type(p.value) is Value]
    values += [v for op in program.ops for v in op.values]
    found += [n for v in values for n in v.type.numbers if type(n) is Number]
    return found + [v for op in program.ops for v in op.outs if type(v) is Number]


class _Graph:
    """Makes the FX nodes of one program."""

    def __init__(self, program: Program, fakes: Fakes) -> None:
        self.program = program
        self.fakes = fakes
        self.graph = fx.Graph()
        self.nodes: dict[Value, fx.Node] = {}
        self.vals: dict[Value, FakeTensor] = {}
        self.wholes: dict[int, tuple[Op, fx.Node]] = {}  # by id of a part: where it comes from
        self.attributes: dict[int, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        self.symbols = SymbolNodes(self.graph, program.naming.fresh)
        self.bindings = Bindings(fakes.mode.shape_env)
        self.used = {v for op in program.ops for v in op.uses}
        self.used |= {v for v in program.results if type(v) is Value}

    def fill(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for port in self.program.inputs:
                self._port(port)
            for op in self.program.ops:
                self._op(op)
            results = tuple(self._argument(v) for v in self.program.results)
        self.graph.output(results)
        self.graph.output_node().meta["val"] = tuple(
            v.meta.get("val") if isinstance(v, fx.Node) else v for v in results
        )

    def _port(self, port: Port) -> None:
        node = self.graph.placeholder(port.name)
        node.meta["val"] = port.value
        if type(port.value) is Value:
            node.meta["val"] = self._fake(port.value, None)
            self.nodes.setdefault(port.value, node)  # tangents share what makes them of one shape
        elif type(port.value) is Number:
            node.meta["val"] = self.fakes.number(port.value)
            self.symbols.known.setdefault(port.value.expr, node)
        self.bindings.of(node.meta["val"])

    def _fake(self, value: Value, of: Value | None) -> FakeTensor:
        """A fake tensor for a value, in the memory of the one it is a view of."""
        if value not in self.vals:
            base = None if of is None else self.vals[of]
            self.vals[value] = self.fakes.tensor(value.type, base)
        return self.vals[value]

    def _op(self, op: Op) -> None:
        args, kwargs = self._argument(op.args), {k: self._argument(v) for k, v in op.kwargs.items()}
        if isinstance(op.target, Drawn | Replayed):
            self._random(op, args, kwargs)
            return
        node = self.graph.create_node("call_function", op.target, args, kwargs, name=op.name)
        _describe(node, op)
        if type(op.out) is Number:
            self._shows(node, self.fakes.number(op.out))
            self.symbols.known.setdefault(op.out.expr, node)
            return
        of = op.args[0] if op.phase == "write" else op.viewed
        vals = [self._fake(v, of) if type(v) is Value else v for v in op.outs]
        self._shows(node, tuple(vals) if type(op.out) is tuple else vals[0])
        if type(op.out) is Value:
            self.nodes[op.out] = node
            return
        for v in op.values:
            self.wholes[id(v)] = op, node
            if self.program.parts_first and v in self.used:
                self._node(v)

    def _shows(self, node: fx.Node, val: Any) -> None:
        node.meta["val"] = val
        bindings = self.bindings.of(val)
        if bindings:
            node.meta["unbacked_bindings"] = bindings

    def _random(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A random op with the state of its generator, as torch's graphs have it."""
        drawn = isinstance(op.target, Drawn)
        args = (op.target.op, *args) if drawn else (args[0], op.target.op, *args[1:])
        node = self.graph.create_node("call_function", as_operator(op.target), args, kwargs, name=op.name)
        _describe(node, op)
        state, *outs = op.outs if drawn else (None, *op.outs)
        vals = [self._fake(v, None) for v in outs]
        several = type(op.out) is tuple and len(op.out) > 1 + drawn
        val = tuple(vals) if several else vals[0]
        node.meta["val"] = val
        if drawn:
            node.meta["val"] = (self._fake(state, None), val)
            self.nodes[state] = self._getitem(node, 0, state.name, op)
            node = self._getitem(node, 1, outs[0].name if not several else f"{op.name}_drawn", op)
        for k, v in enumerate(outs):
            self.nodes[v] = self._getitem(node, k, v.name, op) if several else node

    def _getitem(self, whole: fx.Node, k: int, name: str, op: Op) -> fx.Node:
        node = self.graph.create_node("call_function", operator.getitem, (whole, k), name=name)
        _describe(node, op)
        node.meta["val"] = whole.meta["val"][k]
        return node

    def _node(self, value: Value) -> fx.Node:
        node = self.nodes.get(value)
        if node is None:
            op, whole = self.wholes[id(value)]
            assert value.part is not None
            node = self.nodes[value] = self._getitem(whole, value.part, value.name, op)
        return node

    def _argument(self, value: Any) -> Any:
        if type(value) is Value:
            return self._node(value)
        if type(value) is Number:
            made = self.symbols.node(value)
            made.meta.setdefault("val", self.fakes.number(value))
            return made
        if isinstance(value, Tensor):
            return self._attribute(value, "_tensor_constant")
        if isinstance(value, fx.GraphModule | torch.Generator):
            return self._attribute(value, "_constant")
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return type(value)(self._argument(v) for v in value)
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        return list(value) if isinstance(value, torch.Size) else value

    def _attribute(self, value: Any, kind: str) -> fx.Node:
        node = self.attributes.get(id(value))
        if node is None:
            name = f"{kind}{len(self.constants)}"
            self.constants[name] = value
            node = self.attributes[id(value)] = self.graph.create_node("get_attr", name, name=name)
            if isinstance(value, Tensor):
                node.meta["val"] = value
        return node


def _describe(node: fx.Node, op: Op) -> None:
    if not op.phase:
        return
    node.meta["partitioner_tag"] = _TAGS.get(op.phase, "is_backward")
    if op.meta:
        node.meta.update(op.meta)
    if op.node is not None:
        node.meta["autograd_node"] = op.node
    if op.origin is not None:
        node.meta["origin"] = op.origin
        if "stack_trace" not in node.meta:
            node.meta["stack_trace"] = op.origin.as_traceback()


def type_of(t: Tensor) -> TensorType:
    """What a fake tensor looks like, as a value."""
    strided = t.layout is torch.strided
    device = t.fake_device if isinstance(t, FakeTensor) else t.device
    size, stride = tuple(t.size()), tuple(t.stride()) if strided else ()
    offset: Any = t.storage_offset() if strided else 0
    if any(type(n) is not int for n in (*size, *stride, offset)):
        size, stride = frozen_numbers(size), frozen_numbers(stride)
        offset = frozen_number(offset) if is_symbolic(offset) else offset
    turned = t.dtype.is_complex and t.is_conj()
    return TensorType(t.dtype, size, stride, offset, device, t.layout, turned, t.is_neg())


def program_of(
    role: str, module: fx.GraphModule, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...]
) -> Program:
    """A graph module of somebody else's as a program."""
    read = GraphReader(module)
    taken, returned = len(read.inputs), len(read.results)
    if taken != len(inputs) or returned != len(outputs):
        raise InvalidProgram(
            f"The partition function's {role} takes {taken} values and returns {returned}; it should take "
            f"{len(inputs)} ({_names(inputs)}) and return {len(outputs)} ({_names(outputs)})."
        )
    tape = read.tape(set())
    ports = [Port(slot, value, name) for slot, (name, value) in zip(inputs, read.inputs, strict=True)]
    leaving = list(zip(outputs, read.results, strict=True))
    cut = Cutter(tape).cut(role, ports, leaving, {op.phase for op in tape.ops})
    return replace(cut, made=module)


def program_of_body(module: fx.GraphModule) -> Program:
    """The graph of a function that a control-flow operator runs, as a program."""
    read = GraphReader(module)
    tape = read.tape(set())
    ports = [Port(UserInput(name), value, name) for name, value in read.inputs]
    leaving: list[tuple[Slot, Any]] = [(UserOutput(i), value) for i, value in enumerate(read.results)]
    return Cutter(tape).cut("body", ports, leaving, {op.phase for op in tape.ops})


def _names(slots: tuple[Slot, ...]) -> str:
    return ", ".join(s.describe() for s in slots)


class GraphReader:
    """Reads a graph of ATen ops. Sizes that it reads and computes become numbers in the arguments."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.env: dict[fx.Node, Any] = {}
        self.inputs: list[tuple[str, Any]] = []
        self.ops: list[Op] = []
        self.results: list[Any] = []
        self.fakes: dict[Value, Any] = {}
        for node in module.graph.nodes:
            self._node(node)

    def tape(self, tangents: set[Value]) -> Tape:
        """The ops; those that rest on tangents, or are marked so, are of the backward."""
        later = set(tangents)
        ops = []
        for op in self.ops:
            marked = (op.meta or {}).get("partitioner_tag")
            if marked == "is_backward" or any(v in later for v in op.uses):
                later.update(op.values)
                op = replace(op, phase="backward 1")
            elif marked == "must_be_in_forward":
                op = replace(op, phase="write")
            ops.append(op)
        makers: dict[Any, tuple[int, ...]] = {}
        for i, op in enumerate(ops):
            for v in op.outs:
                numbers = v.type.numbers if type(v) is Value else (v,)
                decided = [n for n in numbers if type(n) is Number and n.hint is None]  # by values
                for symbol in {s for n in decided for s in n.expr.free_symbols}:
                    makers.setdefault(symbol, (i,))
        values = [value for _, value in self.inputs] + [v for op in ops for v in op.outs]
        sized = any(type(n) is Number for v in values for n in (v.type.numbers if type(v) is Value else (v,)))
        naming = Naming()
        for name in [*(name for name, _ in self.inputs), *(op.name for op in ops)]:
            naming.fresh(name)
        return Tape(tuple(ops), len(ops), makers, sized, naming, parts_first=True)

    def _node(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        if node.op == "placeholder":
            value = self.env[node] = self._value(val, node.name)
            self.inputs.append((node.name, value))
        elif node.op == "get_attr":
            self.env[node] = operator.attrgetter(str(node.target))(self.module)
        elif node.op == "output":
            returned = self._argument(node.args[0])
            self.results = list(returned) if isinstance(returned, list | tuple) else [returned]
        elif node.op != "call_function":
            raise InvalidProgram(f"A graph of ATen ops is needed; {node.format_node()} is a {node.op}.")
        elif node.target is operator.getitem and type(self.env.get(node.args[0])) is tuple:  # type: ignore[arg-type]
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        elif is_symbolic(val) and not has_effect(node.target) and not sizes_from_values(val):
            self.env[node] = frozen_number(val)
        else:
            self._op(node, val)

    def _op(self, node: fx.Node, val: Any) -> None:
        args, kwargs = self._argument(node.args), {k: self._argument(v) for k, v in node.kwargs.items()}
        number = len(self.ops)
        out: Any
        if isinstance(val, list | tuple):
            names = {u.args[1]: u.name for u in node.users if u.target is operator.getitem}
            parts = enumerate(val)
            out = tuple(self._value(v, names.get(k, f"{node.name}_{k}"), number, k) for k, v in parts)
        else:
            out = self._value(val, node.name, number)
        self.env[node] = out
        uses = tuple(values_in((args, kwargs)))
        about = node.meta.get("origin"), node.meta.get("autograd_node")
        meta = {k: v for k, v in node.meta.items() if k != "val"}
        keep = has_effect(node.target)
        self.ops.append(Op(node.target, args, kwargs, out, uses, node.name, "forward", keep, *about, meta))

    def _value(self, val: Any, name: str, op: int | None = None, part: int | None = None) -> Any:
        if isinstance(val, Tensor):
            value = Value(len(self.env), type_of(val), name, op, part)
            self.fakes[value] = val
            return value
        return frozen_number(val) if is_symbolic(val) else val

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.env[value]
        if isinstance(value, list):
            return [self._argument(v) for v in value]
        if isinstance(value, tuple):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        return value

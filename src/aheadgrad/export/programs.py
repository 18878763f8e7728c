"""Programs made ready to go out: inputs named after what they are, constants as inputs, the loss' tangent."""

from __future__ import annotations

import keyword
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad.program.check import check
from aheadgrad.program.doors import type_of
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Buffer, ClosedOver, Parameter, Part, SharedBase, Slot, Tangent, UserInput
from aheadgrad.program.values import Op, Port, Value, values_in
from aheadgrad.torchlayer import trees as pytree

_ONES = torch.ops.aten.ones_like.default


def with_one(program: Program, loss: Value) -> Program:
    """A joint program of one tangent, without it: the loss' is one."""
    (port,) = [p for p in program.inputs if isinstance(p.slot, Tangent)]
    name = program.naming.fresh("tangent_of_loss")
    made = replace(port.value, name=name)
    how = {"pin_memory": False, "memory_format": torch.preserve_format}
    one = Op(_ONES, (loss,), how, made, (loss,), name, "backward 1")

    def exchanged(value: Any) -> Any:
        return made if value is port.value else value

    first = next((i for i, op in enumerate(program.ops) if port.value in op.uses), len(program.ops))
    later = [op.mapped(exchanged) if port.value in op.uses else op for op in program.ops[first:]]
    return replace(
        program,
        inputs=tuple(p for p in program.inputs if p is not port),
        ops=(*program.ops[:first], one, *later),
        outputs=tuple((slot, exchanged(value)) for slot, value in program.outputs),
    )


def with_names(program: Program) -> Program:
    """Its inputs, called after what they are."""
    taken = {v.name for op in program.ops for v in op.values} | {op.name for op in program.ops}
    ports = []
    for port in program.inputs:
        name = _name(port.slot) or port.name
        while name in taken or keyword.iskeyword(name) or not name.isidentifier() or name == "args":
            name += "_"
        taken.add(name)
        ports.append(replace(port, name=name))
    return check(replace(program, inputs=tuple(ports)))


def _name(slot: Slot) -> str:
    if isinstance(slot, Part):
        found = _name(slot.of)
        return f"{found}_{slot.index}" if found else ""
    text = {
        Parameter: lambda s: s.name,
        Buffer: lambda s: s.name,
        UserInput: lambda s: s.path,
        ClosedOver: lambda s: s.what,
        SharedBase: lambda _: "shared_memory",
    }.get(type(slot), lambda _: "")(slot)
    text = re.sub(r"\W+", "_", text).strip("_")
    return f"_{text}" if text[:1].isdigit() else text


class Constants:
    """Tensors in the arguments of ops become inputs, so that programs have no data of their own."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}

    def lift(self, program: Program) -> tuple[Program, tuple[str, ...]]:
        """The program, and the names of the constants that it takes behind its other inputs."""
        ports: dict[str, Port] = {}

        def exchanged(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            name = self.names.setdefault(id(t), f"constant_{len(self.names)}")
            self.tensors[name] = t
            if name not in ports:
                value = Value(-1000 - len(ports), type_of(t), name)
                ports[name] = Port(ClosedOver(name), value, name)
            return ports[name].value

        ops = []
        for op in program.ops:
            if any(isinstance(v, Tensor) for v in pytree.tree_leaves((op.args, op.kwargs))):
                args, kwargs = pytree.tree_map(exchanged, (op.args, op.kwargs), is_leaf=pytree.is_size)
                op = replace(op, args=args, kwargs=kwargs, uses=tuple(values_in((args, kwargs))))
            ops.append(op)
        outputs = tuple((slot, exchanged(v)) for slot, v in program.outputs)
        inputs = (*program.inputs, *ports.values())
        return replace(program, inputs=inputs, ops=tuple(ops), outputs=outputs), tuple(ports)

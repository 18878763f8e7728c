"""Programs as text a person can read: each line with its type, each slot with its meaning."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.symbols import Number

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_text(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def type_text(value: Any) -> str:
    """`f32[3, 4]` for a tensor, the type's name for anything else."""
    if type(value) is Value:
        return f"{dtype_text(value.type.dtype)}[{', '.join(str(s) for s in value.type.size)}]"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(type_text(v) for v in value) + ")"
    return value.kind.__name__ if type(value) is Number else type(value).__name__


def op_line(op: Op, names: dict[Value, str] | None = None) -> str:
    """`mul: f32[3] = aten.mul.Tensor(x, 2)  # model.py:3 in forward`."""

    def shown(value: Any) -> str:
        if type(value) is Value:
            return (names or {}).get(value, repr(value))
        if isinstance(value, torch.Tensor):
            return f"constant{list(value.shape)}"
        if isinstance(value, fx.GraphModule):
            return f"function[{sum(n.op == 'call_function' for n in value.graph.nodes)} ops]"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(shown, value))}]"
        return str(value)

    args = ", ".join([*map(shown, op.args), *(f"{k}={shown(v)}" for k, v in op.kwargs.items())])
    parts = ", ".join(repr(v) for v in op.out if type(v) is Value) if type(op.out) is tuple else op.name
    note = f"  # {op.origin}" if op.origin else ""
    return f"{parts}: {type_text(op.out)} = {op.target}({args}){note}"


def text(program: Program) -> str:
    """The whole program: inputs, one line per op, outputs with their slots."""
    lines = [f"{program.role} program"]
    names: dict[Value, str] = {}
    for port in program.inputs:
        if type(port.value) is Value:
            names.setdefault(port.value, port.name)
        lines.append(f"  in  {port.name}: {type_text(port.value)}  = {port.slot.describe()}")
    lines += [f"    {op_line(op, names)}" for op in program.ops]
    for slot, value in program.outputs:
        kind = f": {type_text(value)}" if type(value) is Value else ""
        shown = names.get(value, repr(value)) if type(value) is Value else str(value)
        lines.append(f"  out {shown}{kind}  = {slot.describe()}")
    return "\n".join(lines)

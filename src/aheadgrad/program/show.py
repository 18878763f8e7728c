"""Programs as text a person can read: each line with its type, each slot with its meaning."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aheadgrad.program.program import Program

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


def type_text(value: Any) -> str:
    """`f32[3, 4]` for a tensor, the type's name for anything else."""
    if isinstance(value, torch.Tensor):
        dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(type_text(v) for v in value) + ")"
    return type(value).__name__


def _line(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else str(node.target)
    args = ", ".join([*(str(a) for a in node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    origin = node.meta.get("origin")
    note = f"  # {origin}" if origin else ""
    return f"    {node.name}: {type_text(node.meta.get('val'))} = {target}({args}){note}"


def text(program: Program) -> str:
    """The whole program: inputs, one line per op, outputs with their slots."""
    lines = [f"{program.role} program"]
    for node, slot in zip(program.placeholders, program.signature.inputs, strict=True):
        lines.append(f"  in  {node.name}: {type_text(node.meta.get('val'))}  = {slot.describe()}")
    lines += [_line(n) for n in program.graph.nodes if n.op in ("call_function", "get_attr")]
    for value, slot in zip(program.results, program.signature.outputs, strict=True):
        kind = type_text(value.meta.get("val")) if isinstance(value, fx.Node) else ""
        lines.append(f"  out {value}{': ' + kind if kind else ''}  = {slot.describe()}")
    return "\n".join(lines)

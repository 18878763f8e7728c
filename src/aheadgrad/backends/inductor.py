"""The Inductor backend: programs become fused C++ and Triton kernels.

    aheadgrad.compile(model, backend="inductor", mode="reduce-overhead")

A fusing backend rounds otherwise than eager does, as with `torch.compile`; random numbers are those of eager.
The forward may lay out what it keeps for the backward as it likes: the strides that it reports are what the
backward is compiled for. A program that Inductor cannot compile runs op by op, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.contract import Boxed, Executable, Request, Wants
from aheadgrad.backends.eager import compile_eager
from aheadgrad.errors import FallbackWarning, InvalidOption, reason_of
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Saved, Tangent, UpdatedInput
from aheadgrad.program.values import Value
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.torchlayer import inductor


@dataclass(frozen=True)
class Inductor:
    """`mode` as in `torch.compile`."""

    mode: str = "default"

    wants = Wants(inductor.decompositions, layouts=1, partition="min_cut")

    def __post_init__(self) -> None:
        if self.mode not in inductor.MODES:
            raise InvalidOption(f"mode={self.mode!r}: choose one of {', '.join(inductor.MODES)}.")

    def __call__(self, request: Request) -> Executable:
        program = request.program
        if not program.ops:
            return compile_eager(program)
        lacking = next(filter(None, map(inductor.missing, _devices(program))), None)
        try:
            if lacking is not None:
                raise RuntimeError(f"there is no {lacking}")
            return self._compiled(request)
        except Exception as error:
            _warn(program.role, reason_of(error))
            return _op_by_op(request)

    def _compiled(self, request: Request) -> Executable:
        outputs = request.program.outputs
        family = request.shared.setdefault("family", inductor.Family())
        request = replace(request, mode=family.mode_like(request.mode))
        _leave_out_inputs(request)
        visible = [
            i for i, (slot, v) in enumerate(outputs) if not isinstance(slot, Saved) and type(v) is Value
        ]
        made, strides = inductor.compile_graph(
            request.module,
            request.example_inputs(),
            family,
            self.mode,
            role=request.role,
            static=_static(request),
            donated=(),
            visible=visible,
        )
        updated = request.shared.setdefault("updated", set())
        updated.update(value for slot, value in outputs if isinstance(slot, UpdatedInput))
        return Executable(_with_inputs_laid_out(request.program, made, updated), strides)


def _leave_out_inputs(request: Request) -> None:
    """Inputs that are kept for the backward are kept as they are: Inductor would make copies of them."""
    output = request.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for i, (slot, value) in enumerate(request.program.outputs):
        if isinstance(slot, Saved) and type(value) is Value and value.op is None:
            results[i] = None
    output.args = (tuple(results),)


def _with_inputs_laid_out(program: Program, run: Any, updated: Collection[Value]) -> Boxed:
    """Tangents that come in another layout than the program is made for are copied; so are inputs of the
    call, which it updated, and which now stand for their new values."""
    inputs = enumerate(program.inputs)
    loose = [(i, p.value) for i, p in inputs if isinstance(p.slot, Tangent) or p.value in updated]
    fixed = [(i, v.type.stride) for i, v in loose if all(type(s) is int for s in v.type.stride)]
    if program.role != "backward" or not fixed:
        return lambda args: list(run(args))

    def checked(args: list[Any]) -> list[Any]:
        for i, strides in fixed:
            if args[i].stride() != strides:
                args[i] = _laid_out(args[i], strides)
        return list(run(args))

    return checked


def _static(request: Request) -> list[int]:
    """Inputs that stay where they are: parameters, and for CUDA graphs what the forward kept."""
    if request.role != "backward":
        return list(request.static)
    return [i for i, p in enumerate(request.program.inputs) if isinstance(p.slot, Saved)]


def _devices(program: Program) -> list[str]:
    values = [p.value for p in program.inputs if type(p.value) is Value]
    values += [v for op in program.ops for v in op.values]
    return sorted({v.type.device.type for v in values})


def _warn(role: str, reason: str) -> None:
    text = f"Inductor cannot compile this {role} ({reason}); it runs op by op."
    warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())


def _op_by_op(request: Request) -> Executable:
    """The eager backend; what comes in another layout than recorded is copied first."""
    made = compile_eager(request.program)
    inputs = enumerate(request.program.inputs)
    others = [(i, p.value.type.stride) for i, p in inputs if p.value in request.layouts]
    if not others:
        return made

    def run(args: list[Any]) -> list[Any]:
        for i, strides in others:
            args[i] = _laid_out(args[i], strides)
        return made.call(args)

    return Executable(run)


def _laid_out(t: Tensor, strides: tuple[Any, ...]) -> Tensor:
    if any(type(s) is not int for s in strides):
        return t.contiguous()
    return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)

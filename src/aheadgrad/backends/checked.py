"""A backend beside eager: every program runs twice, and the first op that differs is named.

    aheadgrad.compile(model, backend="checked")              # Inductor's programs
    aheadgrad.compile(model, backend=Checked(my_backend))

Results that differ by more than rounding raise `BackendDiffers`. Then the program is compiled once more with
all its values as results: the first that differs belongs to the op, and to the line of yours, that is named.
If none does (a fault of fusing may go away when everything is wanted), the result itself is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.contract import Backend, Executable, Request, Wants, as_executable, wants_of
from aheadgrad.backends.eager import op_by_op
from aheadgrad.errors import BackendDiffers
from aheadgrad.program.program import Program
from aheadgrad.program.show import op_line
from aheadgrad.program.slots import Saved
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer import random
from aheadgrad.torchlayer.dispatch import is_random

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex128: 1e-9, torch.complex64: 1e-4}
_COARSE = 3e-2  # half precision, and less


@dataclass(frozen=True)
class Checked:
    """`inner` is the backend whose programs are compared with eager."""

    inner: Backend

    @property
    def wants(self) -> Wants:
        return wants_of(self.inner)

    def __call__(self, request: Request) -> Executable:
        made = as_executable(self.inner(request))
        if any(op.keep and not is_random(op.target) for op in request.program.ops):
            return made  # what has an effect must not run twice
        plain = op_by_op(request)

        def run(args: list[Any]) -> list[Any]:
            given = copies(args)
            with random.preserved():
                expected = plain.call(copies(args))
            found = made.call(args)
            for (slot, _), a, b in zip(request.program.outputs, found, expected, strict=True):
                if a is not None and differs(a, b):
                    raise BackendDiffers(self._explained(request, given, slot.describe(), distance(a, b)))
            return found

        return Executable(run, made.strides)

    def _explained(self, request: Request, args: list[Any], what: str, by: float) -> str:
        lines = [
            f"compiled, the {request.role}'s {what} differs from eager by {by:.1e} of its largest value."
        ]
        for op, value, off in self._differing(request, args):
            lines.append(f"  the first op that differs: {value.name}, by {off:.1e}")
            lines.append(f"    {op_line(op)}")
            if op.origin is not None:
                lines.append(op.origin.as_traceback().rstrip())
            return "\n".join(lines)
        return "\n".join([*lines, "  With all values as results nothing differs: perhaps it is fusing."])

    def _differing(self, request: Request, args: list[Any]) -> Iterator[tuple[Op, Value, float]]:
        program = with_all_values(request.program)
        wider = replace(request, program=program, given_away=frozenset(), shared=dict(request.shared))
        with random.preserved():
            expected = op_by_op(wider).call(copies(args))
        with random.preserved():
            found = as_executable(self.inner(wider)).call(copies(args))
        makers = {v: op for op in program.ops for v in op.values}
        for (_, value), a, b in zip(program.outputs, found, expected, strict=True):
            if a is not None and differs(a, b):
                yield makers[value], value, distance(a, b)


def with_all_values(program: Program) -> Program:
    values = [v for op in program.ops for v in op.values]
    return replace(program, outputs=tuple((Saved(v.name), v) for v in values), made=None)


def copies(args: list[Any]) -> list[Any]:
    """The same arguments in memory of their own, laid out as they are."""
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def differs(a: Any, b: Any) -> bool:
    if not isinstance(b, Tensor):
        return bool(a != b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return True
    if not (b.is_floating_point() or b.is_complex()):
        return not torch.equal(a, b)
    return distance(a, b) > _ROUNDING.get(b.dtype, _COARSE)


def distance(a: Any, b: Any) -> float:
    """The largest difference, as a part of the largest value; what is not finite has to be the same."""
    if not isinstance(b, Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape) or not b.numel():
        return float("inf") if isinstance(b, Tensor) and a.shape != b.shape else 0.0
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return float("inf")
    a, b = a.where(finite, 0), b.where(finite, 0)
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))

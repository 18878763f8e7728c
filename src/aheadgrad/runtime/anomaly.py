"""Anomaly mode: a backward op by op, to name the line of the forward whose derivative made a NaN.

Eager checks what each autograd node returns. A compiled backward has the ops of many nodes; each op
knows the node that it was recorded in. So what one node's ops make and another's use (or nobody
here: a result) is what eager looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.backends.eager import laid_out
from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Value, map_leaves
from aheadgrad.torchlayer import random
from aheadgrad.torchlayer.autograd import AutogradNode, set_grad_enabled
from aheadgrad.torchlayer.symbols import Number, with_numbers
from aheadgrad.torchlayer.transforms import is_batched
from aheadgrad.torchlayer.wanted import Wanted

if TYPE_CHECKING:
    from aheadgrad.runtime.backward import Backward

Edges = Mapping[int, tuple[tuple[int, int], ...]]

_AS_STRIDED_SCATTER = torch.ops.aten.as_strided_scatter.default


class NanFound(RuntimeError):
    """What eager raises, and the place in the user's code that the gradient belongs to."""

    def __init__(self, node: AutogradNode, number: int, origin: Any) -> None:
        super().__init__(f"Function '{node.name}' returned nan values in its {number}th output.")
        self.origin = origin


def checked(
    ctx: Any, backward: Backward, saved: list[Any], tangents: tuple[Tensor | None, ...], wanted: Wanted
) -> list[Any] | None:
    """The gradients, once looked through for NaN; None when they are to be computed as usual."""
    present = [t for t in tangents if t is not None]
    if not torch.is_anomaly_check_nan_enabled() or not present or any(map(is_batched, present)):
        return None
    assert backward.checking is not None
    try:
        if not torch.is_grad_enabled():
            return list(backward.checking.run(None, saved, list(tangents), wanted))
        set_grad_enabled(False)  # only a look: the gradients need a history
        try:
            with random.preserved():
                backward.checking.run(None, saved, list(tangents), wanted)
        finally:
            set_grad_enabled(True)
        return None
    except NanFound as error:
        if error.origin is not None:
            ctx.metadata.setdefault("traceback_", []).append(error.origin.as_traceback())
        raise RuntimeError(*error.args) from None


def looking_for_nan(program: Program, edges: Edges) -> Callable[[list[Any]], list[Any]]:
    """A backward that raises `NanFound`; `edges` tell where the gradients of the forward's nodes go."""
    phases = [op.phase for op in program.ops if op.node is not None]
    last = max(phases, key=lambda phase: int(phase.split()[-1]), default=None)  # others are of orders before
    users: dict[Value, list[Op]] = {}
    for op in program.ops:
        for v in op.uses:
            users.setdefault(v, []).append(op)
    returned = {v for v in program.results if type(v) is Value}

    def number_of(value: Value, op: Op) -> int | None:
        """Which of its node's gradients a value is, as far as its users tell; None if it is none."""
        if op.node is None or op.phase != last:
            return None
        using = users.get(value, ())
        if value not in returned and all(u.node == op.node for u in using):
            return None
        known = edges.get(op.node.number, ())
        numbers = {u.node.number for u in using if u.node is not None}
        return next((i for i, number in known if number in numbers), known[0][0] if known else 0)

    made = ((v, number_of(v, op)) for op in program.ops for v in op.values)
    looked_at = {v: number for v, number in made if number is not None}
    return lambda args: _interpret(program, args, looked_at)


def _interpret(program: Program, args: list[Any], looked_at: Mapping[Value, int]) -> list[Any]:
    env: dict[Any, Any] = {}
    for port, arg in zip(program.inputs, args, strict=True):
        env.setdefault(port.value.expr if type(port.value) is Number else port.value, arg)
    args.clear()

    def real(value: Any) -> Any:
        if type(value) is Value:
            return env[value]
        return env[value.expr] if value.expr in env else with_numbers(value, env_numbers())

    def env_numbers() -> dict[Any, Any]:
        return {k: v for k, v in env.items() if type(k) is not Value and isinstance(v, int | float)}

    for value, t in env.items():  # as the ops were recorded; another backend keeps it otherwise
        if type(value) is Value and type(t) is Tensor and t.layout is torch.strided:
            stride = tuple(n if type(n) is int else real(n) for n in value.type.stride)
            if t.stride() != stride and 0 not in stride:
                env[value] = laid_out(t, stride)
    for op in program.ops:
        given = list(map_leaves(op.args, real))
        if op.target is _AS_STRIDED_SCATTER:
            given[0] = given[0].detach()  # its kernel refuses what requires grad, even without grad mode
        out = op.target(*given, **map_leaves(op.kwargs, real))
        for v, result in zip(op.outs, out if type(op.out) is tuple else (out,), strict=True):
            env[v.expr if type(v) is Number else v] = result
            if v in looked_at and isinstance(result, Tensor) and bool(result.isnan().any()):
                assert op.node is not None
                raise NanFound(op.node, looked_at[v], op.origin)
    return [map_leaves(r, real) for r in program.results]

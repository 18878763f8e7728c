"""A call under transforms of `torch.func`, taken apart level by level.

    grad    a node of that level: its forward is the call below, its backward calls `derived.vjp`
    vmap    `derived.vmap` below, of the tensors inside the batched ones
    jvp     `derived.jvp` below, of values and tangents

What remains below all levels is a compiled function of plain tensors, which has a history if they have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.derived import Derived
from aheadgrad.torchlayer.dispatch import dual_level, duals_hidden
from aheadgrad.torchlayer.functorch_levels import (
    Level,
    SingleLevelFunction,
    apply_at_level,
    depth,
    made_dual,
    taken_apart,
    without_dead_levels,
)


def run_at_levels(derived: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """`derived` of these operands, at the level that we are in."""
    operands = [without_dead_levels(t) for t in operands]
    if depth() == 0:
        return _at_the_bottom(derived, operands)
    level = Level()
    if level.kind == "grad":
        return _grad(level, derived, operands)
    if level.kind == "vmap":
        return _vmap(level, derived, operands)
    if level.kind == "jvp":
        return _jvp(level, derived, operands)
    raise FallbackError("a transform that is none of grad, vmap and jvp is active")


def _at_the_bottom(derived: Any, operands: list[Any]) -> tuple[Any, ...]:
    if dual_level() >= 0 and taken_apart(operands)[1]:
        raise FallbackError("there are tangents of torch.autograd.forward_ad, in which torch nests no jvp")
    return derived.run(operands)


def _duals(outs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Outputs with their tangents, where they can have some."""
    half = len(outs) // 2
    pairs = zip(outs[:half], outs[half:], strict=True)
    return tuple(made_dual(out, t) if _is_differentiable(out) else out for out, t in pairs)


def _is_differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _tensors(operands: Sequence[Any], see: Any) -> list[Any]:
    return [see(t) if isinstance(t, Tensor) else t for t in operands]


def _vmap(level: Level, derived: Any, operands: list[Any]) -> tuple[Any, ...]:
    pairs = [level.unbatch(t) if isinstance(t, Tensor) else (t, None) for t in operands]
    dims = tuple(dim for _, dim in pairs)
    if all(dim is None for dim in dims):
        with level.below():
            return run_at_levels(derived, operands)
    each = derived.vmap(dims, level.randomness)
    with level.below():
        outs = run_at_levels(each, [t for t, _ in pairs])
    return tuple(level.batch(t) if batched else t for t, batched in zip(outs, each.batched, strict=True))


def _jvp(level: Level, derived: Any, operands: list[Any]) -> tuple[Any, ...]:
    plain, tangents = taken_apart(_tensors(operands, level.lift))
    given = _tensors([*plain, *tangents.values()], level.unwrap)
    with level.below():
        outs = run_at_levels(derived.jvp(tuple(tangents)) if tangents else derived, given)
    wrapped = tuple(map(level.wrap, outs))
    return _duals(wrapped) if tangents else wrapped


def _grad(level: Level, derived: Any, operands: list[Any]) -> tuple[Any, ...]:
    lifted = _tensors(operands, level.lift)
    tracked = tuple(k for k, t in enumerate(lifted) if isinstance(t, Tensor) and t.requires_grad)
    if tracked and torch.is_grad_enabled():
        return tuple(apply_at_level(_Node, derived, level, tracked, *lifted))
    with level.below():
        outs = run_at_levels(derived, _tensors(lifted, level.unwrap))
    return tuple(map(level.wrap, outs))


class _Node(SingleLevelFunction):
    """The call as seen by one level of `grad` (or `vjp`, `jacrev`)."""

    @staticmethod
    def forward(ctx: Any, derived: Any, level: Level, tracked: tuple[int, ...], *operands: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.derived, ctx.tracked = derived, tracked
        ctx.others = _tensors(operands, lambda t: None)
        ctx.save_for_backward(*(t for t in operands if isinstance(t, Tensor)))
        given = _tensors(operands, level.unwrap)
        ctx.history = None
        with level.below(from_node=True):
            if depth() == 0 and type(derived) is Derived:
                outs, ctx.history = _with_history(derived, given, tracked)
            else:
                outs = run_at_levels(derived, given)
        wrapped = tuple(map(level.wrap, outs))
        if ctx.history is not None:
            ctx.mark_non_differentiable(*ctx.history.constant(wrapped))
        return wrapped

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        present = tuple(k for k, t in enumerate(tangents) if t is not None)
        grads: list[Any] = [None] * (3 + len(ctx.others))
        if not present:
            return tuple(grads)
        saved = iter(ctx.saved_tensors)
        tensors = [next(saved) if was is None else was for was in ctx.others]
        further = ctx.derived.vjp(ctx.tracked, present)
        if ctx.history is not None:
            further = _Continued(further, ctx.history, ctx.tracked, present)
        found = run_at_levels(further, [*tensors, *(tangents[k] for k in present)])
        for k, grad in zip(ctx.tracked, found, strict=True):
            grads[3 + k] = grad
        return tuple(grads)


def _with_history(derived: Derived, given: list[Any], tracked: tuple[int, ...]) -> Any:
    """Below the last level: plain autograd keeps what the backward needs."""
    own = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
    if own and not all(given[k].requires_grad for k in tracked):
        return run_at_levels(derived, given), None
    if not own:
        given = [t.detach().requires_grad_() if k in tracked else t for k, t in enumerate(given)]
    with torch.enable_grad():
        outs = derived.run(given)
    history = _History([given[k] for k in tracked], outs, own=own)
    return (outs if own else tuple(t.detach() for t in outs)), history


class _History:
    """What a call below all levels has left for its backward: inputs, and outputs with a history.

    `own`: a history that others have a part in, which gradients have to have as well.
    """

    def __init__(self, inputs: list[Tensor], outs: tuple[Tensor, ...], *, own: bool) -> None:
        self.inputs, self.outs, self.own = inputs, outs, own

    def constant(self, outs: tuple[Tensor, ...]) -> list[Tensor]:
        return [out for out, known in zip(outs, self.outs, strict=True) if not known.requires_grad]

    def gradients(self, present: tuple[int, ...], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outs = [self.outs[k] for k in present]
        create = torch.is_grad_enabled() and (self.own or any(t.requires_grad for t in tangents))
        with duals_hidden():
            found = torch.autograd.grad(
                outs, self.inputs, tangents, retain_graph=True, create_graph=create, allow_unused=True
            )
        pairs = zip(found, self.inputs, strict=True)
        return tuple(torch.zeros_like(t) if grad is None else grad for grad, t in pairs)


class _Continued:
    """A vjp of which the first half has run: what no further transform changes goes on from there."""

    def __init__(self, further: Derived, history: _History, tracked: Any, present: tuple[int, ...]) -> None:
        self.further, self.history, self.tracked, self.present = further, history, tracked, present
        self.vmap, self.vjp, self.jvp = further.vmap, further.vjp, further.jvp

    def run(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        return self.history.gradients(self.present, operands[len(operands) - len(self.present) :])

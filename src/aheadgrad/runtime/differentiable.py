"""Differentiable backwards: what a node does when its backward runs under `create_graph=True`.

The gradients are computed by a compiled program as always, and then adopted by a node of the next
order, which leads back to the inputs of this one and to the tangents. That node is like any other:
it saves what its backward needs, finds its backward by the tangents it gets, and can be
differentiated in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import HigherOrderError
from aheadgrad.joint.level import Component, Level
from aheadgrad.partition.saved import SavedSet
from aheadgrad.runtime.backward import Backward, Failure, Tangents, few
from aheadgrad.runtime.by_sizes import BySizes
from aheadgrad.runtime.by_values import ByValues
from aheadgrad.runtime.freeing import lifetime_of
from aheadgrad.runtime.further_steps import Steps
from aheadgrad.runtime.handing import Handing
from aheadgrad.runtime.links import Ways
from aheadgrad.torchlayer.autocast import any_autocast, autocast_state
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.transforms import batch_level, batched, is_batched, unbatched
from aheadgrad.torchlayer.wanted import Wanted


class Higher:
    """The differentiable backwards of one node, by the tangents they get: made when first asked for."""

    def __init__(
        self,
        level: Level,
        component: Component,
        saved: SavedSet,
        ways: Ways,
        backward: Backward,
        steps: Steps,
    ) -> None:
        self.level = level
        self.component = component
        self.saved = saved
        self.ways = ways
        self.backward = backward
        self.made: dict[Any, Any] = {}
        self.known: dict[Any, Any] = {}  # those that are found at a glance
        self.sets: set[Wanted] = set()
        self.steps = steps
        self.handing = Handing(level, component, saved, backward, steps)

    def run(self, ctx: Any, tangents: tuple[Tensor | None, ...], wanted: Wanted) -> list[Any]:
        """Gradients with a history, one per input that the node leads to; None where not wanted."""
        # how a tangent is laid out, and whether it requires grad; False where there is more to it
        looks = tuple(
            [
                t
                if t is None
                else t.__class__ is Tensor and not is_batched(t) and (t.stride(), t.requires_grad)
                for t in tangents
            ]
        )
        step = self.known.get((looks, wanted))
        if step is None or any_autocast():
            return self._run(ctx, tangents, wanted, looks)
        life = ctx.lifetime or lifetime_of(ctx)
        life.handing = self.handing
        grads: list[Any] = step(ctx, life, *tangents)
        return grads

    def _run(
        self, ctx: Any, tangents: tuple[Tensor | None, ...], wanted: Wanted, looks: tuple[Any, ...]
    ) -> list[Any]:
        """The same, with a step that may still have to be made."""
        present = [t for t in tangents if t is not None]
        if not self.level.options.any_order:
            raise HigherOrderError(
                "A second derivative was asked for through a function that was compiled with "
                "any_order=False. Compile it without that option, or use the uncompiled function here."
            )
        life = lifetime_of(ctx)
        life.handing = self.handing
        self.handing.is_met = True
        if not present:
            return [None] * len(self.ways.carried)

        def run(given: tuple[Tensor | None, ...]) -> list[Any]:
            step, tangents = self._find(given, wanted)
            if isinstance(step, BySizes | ByValues):
                sizes = ctx.sizes if self.saved.sizes else ()
                held = ctx.saved_tensors[: len(self.saved.tensors)] if self.saved.tensors else ()
                step = step.find([*sizes, *held, *(t for t in tangents if t is not None)])
            if isinstance(step, Failure):
                return step([])
            grads: list[Any] = step(ctx, life, *tangents)
            return grads

        if any(map(is_batched, present)):
            return one_by_one(run, tangents)
        grads = run(tangents)
        if not self.level.lays_out and False not in looks:  # else sizes matter, or forms
            pattern, _ = self.backward.arranged(tangents)
            made = self.made.get((pattern, _requiring(tangents), None, wanted))
            if made.__class__ is FunctionType:
                self.known[looks, wanted] = made
        return grads

    def _find(self, tangents: tuple[Tensor | None, ...], wanted: Wanted) -> tuple[Any, Tangents]:
        """The step for these tangents and gradients, and the tangents as it wants them."""
        state = None if self.level.fixed_autocast else autocast_state()
        requiring = _requiring(tangents)
        pattern, given = self.backward.arranged(tangents)
        step = self.made.get((pattern, requiring, state, wanted))
        if step is None:
            pattern, given = self.backward.arranged(tangents, {k[0] for k in self.made})
            step = self.made.get((pattern, requiring, state, wanted))
        if step is None:
            with RECORDING:
                wanted = None if wanted is None else few(self.sets, wanted)
                key = pattern, requiring, state, wanted
                step = self.made.get(key)
                if step is None:
                    step = self.made[key] = self.steps.differentiable(
                        self.component, self.saved, self.ways, pattern, requiring, state, wanted
                    )
        return step, given


def one_by_one(
    run: Callable[[tuple[Tensor | None, ...]], list[Any]], tangents: tuple[Tensor | None, ...]
) -> list[Any]:
    """For `is_grads_batched=True`: the history belongs to the tensors behind the batched ones."""
    level = batch_level()
    given = [unbatched(t, level) if t is not None and is_batched(t) else t for t in tangents]
    (count,) = {t.size(0) for t, b in zip(given, tangents, strict=True) if t is not None and t is not b}
    rows = [
        run(tuple(t if t is b or t is None else t[i] for t, b in zip(given, tangents, strict=True)))
        for i in range(count)
    ]
    return [
        None if column[0] is None else batched(torch.stack(column), level)
        for column in zip(*rows, strict=True)
    ]


def _requiring(tangents: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
    return tuple(t is not None and t.requires_grad for t in tangents)

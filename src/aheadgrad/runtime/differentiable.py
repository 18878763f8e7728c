"""Differentiable backwards: what a node does when its backward runs under `create_graph=True`.

The gradients are computed by a compiled program as always, and then adopted by a node of the next
order, which leads back to the inputs of this one and to the tangents. That node is like any other:
it saves what its backward needs, finds its backward by the tangents it gets, and can be
differentiated in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.contract import Executable
from aheadgrad.errors import HigherOrderError
from aheadgrad.joint.level import Component, Level, NextOrder
from aheadgrad.partition.next_order import HigherSplit
from aheadgrad.partition.saved import SavedSet
from aheadgrad.program.program import Program
from aheadgrad.program.values import Value
from aheadgrad.runtime.assemble import nowhere
from aheadgrad.runtime.backward import Backward, Failure, few
from aheadgrad.runtime.by_sizes import BySizes
from aheadgrad.runtime.by_values import ByValues
from aheadgrad.runtime.freeing import lifetime_of
from aheadgrad.runtime.handing import Handing
from aheadgrad.runtime.links import Ways
from aheadgrad.runtime.steps import Steps, backward_of
from aheadgrad.torchlayer.autocast import AutocastState, autocast_state
from aheadgrad.torchlayer.autograd import keeps_graph, set_grad_enabled
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.subclasses import parts_of, values_of
from aheadgrad.torchlayer.transforms import batch_level, batched, is_batched, unbatched
from aheadgrad.torchlayer.wanted import Wanted

differentiable_runs: Counter[int] = Counter()
"""How many differentiable backwards ran compiled, by the order of the derivatives they gave."""


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
        self.sets: set[Wanted] = set()
        self.steps = steps
        self.handing = Handing(level, component, saved, backward, steps)

    def run(self, ctx: Any, tangents: tuple[Tensor | None, ...], wanted: Wanted) -> list[Any]:
        """Gradients with a history, one per input that the node leads to; None where not wanted."""
        present = [t for t in tangents if t is not None]
        if not self.level.options.any_order:
            raise HigherOrderError(
                "A second derivative was asked for through a function that was compiled with "
                "any_order=False. Compile it without that option, or use the uncompiled function here."
            )
        count = len(self.saved.tensors)
        sizes = ctx.sizes if self.saved.sizes else ()
        held = ctx.saved_tensors if count or self.ways.linked(ctx) else ()
        inputs = self.ways.inputs(ctx, held, held[count:])
        lifetime_of(ctx).handing = self.handing
        self.handing.is_met = True
        if not present:
            return [None] * len(inputs)

        def run(tangents: tuple[Tensor | None, ...]) -> list[Any]:
            step, tangents = self._find(tangents, wanted)
            if isinstance(step, BySizes | ByValues):
                step = step.find([*sizes, *held[:count], *(t for t in tangents if t is not None)])
            if isinstance(step, Failure):
                return step([])
            grads: list[Any] = step.run(ctx, sizes, held[:count], tangents, inputs)
            return grads

        if any(map(is_batched, present)):
            return one_by_one(run, tangents)
        return run(tangents)

    def _find(
        self, tangents: tuple[Tensor | None, ...], wanted: Wanted
    ) -> tuple[Any, tuple[Tensor | None, ...]]:
        """The step for these tangents and gradients, and the tangents as it wants them."""
        state = None if self.level.fixed_autocast else autocast_state()
        requiring = tuple(t is not None and t.requires_grad for t in tangents)
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


@dataclass(frozen=True, eq=False)
class NextNode:
    """A node that adopts gradients: which ones, from what, leading where."""

    apply: Any
    exits: tuple[int, ...]
    kept: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """One differentiable backward: its program, and the nodes that adopt the gradients.

    Inputs are numbered: those of the node below, then the tangents.
    """

    order: int
    program: Any
    gradients: int
    nodes: tuple[NextNode, ...]
    detached: frozenset[int]
    passed_on: dict[int, int]
    autocast: AutocastState | None
    veiled: bool

    def run(
        self, ctx: Any, sizes: Any, saved: Any, tangents: tuple[Tensor | None, ...], inputs: list[Tensor]
    ) -> list[Any]:
        present = [t for t in tangents if t is not None]
        results = self._compute([*sizes, *saved, *present])
        grads = results[: self.gradients]
        parts = (p for t in present for p in (parts_of(t) if self.veiled else (t,)))
        pool = [*saved, *parts, *results[self.gradients :]]
        given = [*inputs, *tangents]
        for i in self.detached:
            grads[i] = grads[i].detach()
        for i, k in self.passed_on.items():
            grads[i] = given[k]
        for node in self.nodes:
            outs = node.apply(
                tuple([grads[i] for i in node.exits]),
                tuple([pool[k] for k in node.kept]),
                sizes,
                *([given[k] for k in node.inputs] or [nowhere()]),
            )
            outs = outs if isinstance(outs, tuple) else (outs,)
            if outs[0].grad_fn is not None:
                outs[0].grad_fn.below = lifetime_of(ctx)
            for i, out in zip(node.exits, outs, strict=False):
                grads[i] = out
        if not keeps_graph():  # under create_graph, but asked not to retain
            lifetime_of(ctx).freed = True
        differentiable_runs[self.order] += 1
        return grads

    def _compute(self, args: list[Any]) -> list[Any]:
        set_grad_enabled(False)
        try:
            if self.autocast is None:
                return list(self.program(args))
            with self.autocast.suspended():
                return list(self.program(args))
        finally:
            set_grad_enabled(True)


def make_step(
    level: NextOrder,
    split: HigherSplit,
    program: Executable,
    backwards: Sequence[Executable | None],
    given: SavedSet,
    ways: Ways,
    state: AutocastState | None,
    steps: Steps,
) -> Step:
    """`program` is the backward itself, `backwards` are those of its gradients, by component."""
    numbers = {t.key: k for k, t in enumerate(level.recorded.component.targets)}
    places = {k: j for k, j in enumerate(ways.carried) if j is not None}  # input number to pool position
    position = len(given.tensors)
    for number, (t, key) in enumerate(
        zip(level.recorded.tangents, level.tangents, strict=True), len(ways.carried)
    ):
        if type(t) is Value:
            places[number] = position
        position += len(values_of(t)) if t is not None else 0
        if key is not None:
            numbers[key] = number
    nodes = []
    for component, kept, saved, run in zip(level.components, split.kept, split.saved, backwards, strict=True):
        inputs = tuple(numbers[t.key] for t in component.targets)
        carried = tuple(kept.index(places[k]) if places.get(k) in kept else None for k in inputs)
        apply = _next_apply(level, component, saved, run, Ways(tuple(range(len(inputs))), carried), steps)
        nodes.append(NextNode(apply, component.exits, kept, inputs))
    return Step(
        level.order,
        program.call,
        level.count,
        tuple(nodes),
        _borrowed(level, split.program),
        {i: numbers[key] for i, key in level.passed_on.items()},
        None if level.fixed_autocast else state,
        level.veiled,
    )


def _next_apply(
    level: NextOrder,
    component: Component,
    saved: SavedSet,
    usual: Executable | None,
    ways: Ways,
    steps: Steps,
) -> Any:
    from aheadgrad.runtime.node import make_node  # nodes and their derivatives know each other

    failure = level.failures.get(component.number)
    backward = backward_of(level, component, saved, usual, steps)
    apply, _ = make_node(
        backward,
        len(component.exits),
        len(saved.tensors),
        len(saved.sizes),
        len(component.targets),
        f"{level.order + 1}_{component.number}",
        ways=ways,
        higher=Higher(level, component, saved, ways, backward, steps),
        failure=None if failure is None else Failure(failure),
        visits_below=any(t.key not in level.tangents for t in component.targets),
    )
    return apply


def _borrowed(level: NextOrder, program: Program) -> frozenset[int]:
    """Gradients that share memory with something else, of which a node cannot make its own output."""
    found = set()
    own = {v for op in program.ops if not is_view_op(op.target) for v in op.values}
    results = iter(program.results)
    for i, e in enumerate(level.leaving):
        values = [next(results) for _ in values_of(e.value)]
        if (
            e.differentiable and type(e.value) is Value and values[0] not in own
        ):  # wholes are put together anew
            found.add(i)
        own.difference_update(values)
    return frozenset(found)

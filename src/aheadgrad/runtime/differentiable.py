"""Differentiable backwards: what a node does when its backward runs under `create_graph=True`.

The gradients are computed by a compiled program as always, and then adopted by a node of the next
order, which leads back to the inputs of this one and to the tangents. That node is like any other:
it saves what its backward needs, finds its backward by the tangents it gets, and can be
differentiated in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.registry import compile_program
from aheadgrad.errors import AheadgradError, HigherOrderError
from aheadgrad.partition.next_order import split_higher
from aheadgrad.partition.split import SavedSet, backward_program
from aheadgrad.recording.components import Component
from aheadgrad.recording.forward import explained
from aheadgrad.recording.joint import dense_order
from aheadgrad.recording.orders import Derivative, Level, differentiate
from aheadgrad.runtime.assemble import nowhere
from aheadgrad.runtime.backward import MAX_LAYOUTS, Failure, laid_out
from aheadgrad.runtime.backward_for import at_hand, backward_for, lays_out
from aheadgrad.runtime.by_sizes import BySizes, record
from aheadgrad.runtime.by_values import ByValues
from aheadgrad.runtime.fates import fate_of
from aheadgrad.runtime.links import Ways
from aheadgrad.torchlayer.assumptions import Sizes
from aheadgrad.torchlayer.autocast import AutocastState, autocast_state
from aheadgrad.torchlayer.autograd import keeps_graph, set_grad_enabled
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.strides import dense_strides
from aheadgrad.torchlayer.subclasses import is_plain
from aheadgrad.torchlayer.transforms import batch_level, batched, is_batched, unbatched

differentiable_runs: Counter[int] = Counter()
"""How many differentiable backwards ran compiled, by the order of the derivatives they gave."""


class Higher:
    """The differentiable backwards of one node, by the tangents they get: made when first asked for."""

    def __init__(self, level: Level, component: Component, saved: SavedSet, ways: Ways) -> None:
        self.level = level
        self.component = component
        self.saved = saved
        self.ways = ways
        self.steps: dict[Any, Step | Failure] = {}
        self._lock = level.session.lock
        self._expected = level.joint.expected_pattern(component)
        self._orders = (
            tuple(dense_order(level.joint.exits[i].traced) for i in component.exits)
            if lays_out(level) and not level.session.veiled
            else None
        )

    def run(self, ctx: Any, tangents: tuple[Tensor | None, ...]) -> list[Any]:
        """Gradients with a history, one per input that the node leads to."""
        if self.level.session.veiled or not all(t is None or is_plain(t) for t in tangents):
            raise HigherOrderError(
                "A second derivative was asked for through a compiled call with tensor subclasses. Use the "
                "uncompiled function where you need it."
            )
        if not self.level.options.any_order:
            raise HigherOrderError(
                "A second derivative was asked for through a function that was compiled with "
                "any_order=False. Compile it without that option, or use the uncompiled function here."
            )
        count = len(self.saved.tensors)
        sizes = ctx.sizes if self.saved.sizes else ()
        held = ctx.saved_tensors if count or self.ways.linked(ctx) else ()
        inputs = self.ways.inputs(ctx, held, held[count:])
        if all(t is None for t in tangents):
            return [None] * len(inputs)

        def run(tangents: tuple[Tensor | None, ...]) -> list[Any]:
            step, tangents = self._find(tangents)
            if isinstance(step, BySizes | ByValues):
                step = step.find([*sizes, *held[:count], *(t for t in tangents if t is not None)])
            if isinstance(step, Failure):
                return step([])
            grads: list[Any] = step.run(ctx, sizes, held[:count], tangents, inputs)
            return grads

        if any(t is not None and is_batched(t) for t in tangents):
            return one_by_one(run, tangents)
        return run(tangents)

    def _find(self, tangents: tuple[Tensor | None, ...]) -> tuple[Any, tuple[Tensor | None, ...]]:
        """The step for these tangents, and the tangents as it wants them."""
        if self._orders is not None:
            tangents = tuple(map(_ordered, tangents, self._orders))
            layouts: tuple[Any, ...] = tuple(t is not None for t in tangents)
        else:
            layouts = tuple(None if t is None else t.stride() for t in tangents)
        requiring = tuple(t is not None and t.requires_grad for t in tangents)
        state = None if self.level.fixed_autocast else autocast_state()
        key = (layouts, requiring, state)
        step = self.steps.get(key)
        if step is None and self._orders is None and len(self.steps) >= MAX_LAYOUTS:
            tangents = tuple(map(laid_out, tangents, self._expected))
            key = (tuple(None if t is None else t.stride() for t in tangents), requiring, state)
            step = self.steps.get(key)
        if step is None:
            with self._lock:
                step = self.steps.get(key)
                if step is None:
                    step = self.steps[key] = self._make(key[0], requiring, state)
        return step, tangents

    def _make(self, layouts: Any, requiring: tuple[bool, ...], state: AutocastState | None) -> Any:
        level = self.level
        pattern = layouts
        if self._orders is not None:
            pattern = tuple(e if there else None for e, there in zip(self._expected, layouts, strict=True))
        state = level.backward_autocast if level.fixed_autocast else state
        exits = [level.joint.exits[i].traced for i in self.component.exits]
        tangents = [t for t, there in zip(exits, pattern, strict=True) if there is not None]

        def make(sizes: Sizes | None) -> Any:
            try:
                derivative = differentiate(level, self.component, pattern, requiring, state)
            except Exception as error:
                ours = explained(error)
                if isinstance(ours, AheadgradError):
                    raise ours from error
                return Failure(error)
            derivative.fixed_sizes = sizes
            return make_step(derivative, self.saved, self.ways, state)

        return record(level, [*at_hand(self.saved), *tangents], len(tangents), make)


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


def _ordered(t: Tensor | None, order: tuple[int, ...]) -> Tensor | None:
    return None if t is None else laid_out(t, dense_strides(tuple(t.size()), order))


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

    def run(
        self, ctx: Any, sizes: Any, saved: Any, tangents: tuple[Tensor | None, ...], inputs: list[Tensor]
    ) -> list[Any]:
        present = [t for t in tangents if t is not None]
        results = self._compute([*sizes, *saved, *present])
        grads = results[: self.gradients]
        pool = [*saved, *present, *results[self.gradients :]]
        given = [*inputs, *tangents]
        for i in self.detached:
            grads[i] = grads[i].detach()
        for i, k in self.passed_on.items():
            grads[i] = given[k]
        for node in self.nodes:
            outs = node.apply(
                tuple(grads[i] for i in node.exits),
                tuple(pool[k] for k in node.kept),
                sizes,
                *([given[k] for k in node.inputs] or [nowhere()]),
            )
            outs = outs if isinstance(outs, tuple) else (outs,)
            if outs[0].grad_fn is not None:
                outs[0].grad_fn.below = fate_of(ctx)
            for i, out in zip(node.exits, outs, strict=False):
                grads[i] = out
        if not keeps_graph():  # under create_graph, but asked not to retain
            fate_of(ctx).freed = True
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


def make_step(derivative: Derivative, given: SavedSet, ways: Ways, state: AutocastState | None) -> Step:
    split = split_higher(derivative, given)
    numbers = {id(t.leaf): k for k, t in enumerate(derivative.recorded.component.targets)}
    traced = derivative.recorded.traced
    assert traced is not None
    places = {k: j for k, j in enumerate(ways.carried) if j is not None}  # input number to pool position
    position = len(given.tensors)
    for i, t in enumerate(traced.tangents):
        if t is not None:
            number = len(ways.carried) + i
            numbers[id(t)] = number
            places[number] = position
            position += 1
    nodes = tuple(
        _next_node(derivative, number, split.kept[number], split.saved[number], numbers, places)
        for number in range(len(derivative.joint.components))
    )
    passed = {}
    for i in range(len(derivative.exits)):
        target = derivative.passed_on(i)
        if target is not None:
            passed[i] = numbers[id(target.leaf)]
    return Step(
        derivative.order,
        compile_program(derivative.options.backend, split.program),
        len(derivative.exits),
        nodes,
        _borrowed(derivative),
        passed,
        None if derivative.fixed_autocast else state,
    )


def _next_node(
    derivative: Derivative,
    number: int,
    kept: tuple[int, ...],
    saved: SavedSet,
    numbers: dict[int, int],
    places: dict[int, int],
) -> NextNode:
    from aheadgrad.runtime.node import make_node  # nodes and their derivatives know each other

    component = derivative.joint.components[number]
    gradients = derivative.gradients[number]
    known = None
    if gradients is not None and gradients.pattern == derivative.joint.expected_pattern(component):
        program = backward_program(derivative, gradients, saved)
        known = compile_program(derivative.options.backend, program)
    inputs = tuple(numbers[id(t.leaf)] for t in component.targets)
    carried = tuple(kept.index(places[k]) if places.get(k) in kept else None for k in inputs)
    ways = Ways(tuple(range(len(inputs))), carried)
    failure = derivative.failures.get(number)
    through = any(id(t.leaf) not in derivative.slots for t in component.targets)
    apply, _ = make_node(
        backward_for(derivative, component, saved, known),
        len(component.exits),
        len(saved.tensors),
        len(saved.sizes),
        len(component.targets),
        f"{derivative.order + 1}_{number}",
        ways=ways,
        higher=Higher(derivative, component, saved, ways),
        failure=None if failure is None else Failure(failure),
        visits_below=through,
    )
    return NextNode(apply, tuple(component.exits), kept, inputs)


def _borrowed(derivative: Derivative) -> frozenset[int]:
    """Gradients that share memory with something else, of which a node cannot make its own output."""
    trace = derivative.cutter.trace
    found = set()
    seen: set[int] = set()
    for i, e in enumerate(derivative.exits):
        if not e.differentiable:
            continue
        source = derivative.cutter.source(e.value)
        made = trace.producer(source)
        if made is None or is_view_op(trace.records[made.record].target) or id(source) in seen:
            found.add(i)
        seen.add(id(source))
    return frozenset(found)

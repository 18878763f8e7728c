"""One differentiable backward as a generated function: `step(ctx, life, *tangents) -> gradients`.

def differentiable_backward(ctx, life, t0):
    s0, s1, = ctx.saved_tensors
    i0 = ctx.next_functions[0][0].variable      # an input that was not saved
    ...                                         # the program, without grad mode
    g0, g1, = apply((mm, sum), (s0, t0), (), i0, s1, t0)
    return [g0, g1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aheadgrad.backends.contract import Executable
from aheadgrad.conventions.whole_subclasses import open_up
from aheadgrad.emit.script import Script
from aheadgrad.joint.level import Component, NextOrder
from aheadgrad.partition.next_order import HigherSplit
from aheadgrad.partition.saved import SavedSet
from aheadgrad.program.program import Program
from aheadgrad.program.values import Value
from aheadgrad.runtime.assemble import nowhere
from aheadgrad.runtime.backward import Failure
from aheadgrad.runtime.freeing import BEFORE
from aheadgrad.runtime.further_steps import Steps, backward_of
from aheadgrad.runtime.links import NOTHING, Ways
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.autograd import keeps_graph, run_before, set_grad_enabled
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.subclasses import Bundle, values_of
from aheadgrad.torchlayer.wanted import find_leaves, places_of_none


@dataclass(frozen=True, eq=False)
class NextNode:
    """A node that adopts gradients: which ones, from what, leading where.

    Inputs are numbered: those of the node below, then the tangents. So is what can be kept: saved tensors,
    then tangents that are there (or their parts), then results of the program behind the gradients.
    """

    apply: Any
    exits: tuple[int, ...]
    kept: tuple[int, ...]
    inputs: tuple[int, ...]
    links: bool


@dataclass(frozen=True, eq=False)
class Step:
    """One differentiable backward: its program, and the nodes that adopt the gradients."""

    program: Executable
    results: int
    gradients: int
    given: SavedSet
    ways: Ways
    tangents: tuple[Any, ...]
    nodes: tuple[NextNode, ...]
    detached: frozenset[int]
    passed_on: dict[int, int]
    autocast: AutocastState | None
    veiled: bool

    def function(self) -> Any:
        script = Script("differentiable_backward")
        name = script.names.name
        given = self._take_given(script)
        present = {f"t{i}": t for i, t in enumerate(self.tangents) if t is not None}
        sizes = [f"n{i}" for i in range(len(self.given.sizes))]
        saved = [f"s{i}" for i in range(len(self.given.tensors))]
        self._compute(script, [*sizes, *saved, *present])
        parts = [p for t, value in present.items() for p in _opened(script, t, value)]
        pool = [*saved, *parts, *(f"r{i}" for i in range(self.gradients, self.results))]
        for i in sorted(self.detached):
            script.line(f"r{i} = r{i}.detach()")
        for i, k in self.passed_on.items():
            script.line(f"r{i} = {given[k]}")
        own = len(self.ways.carried)
        for node in self.nodes:
            outs = "".join(f"r{i}, " for i in node.exits)
            kept = "".join(f"{pool[k]}, " for k in node.kept)
            inputs = [given[k] for k in node.inputs] or [f"{name(nowhere, 'nowhere')}()"]
            call = f"{name(node.apply, 'apply')}(({outs}), ({kept}), {'sizes' if sizes else '()'}, "
            call += f"{', '.join(inputs)})"
            first = f"r{node.exits[0]}"
            if len(node.exits) == 1:
                script.line(f"{first} = {call}")
                if node.links:
                    with script.block(f"if {first}.__class__ is tuple:"):
                        script.line(f"{first} = {first}[0]")
            else:
                script.line(f"{outs}= {call}{f'[:{len(node.exits)}]' if node.links else ''}")
            script.line(f"node = {first}.grad_fn")
            with script.block("if node is not None:"):
                script.line("node.below = life")
                script.line(f"{name(run_before, 'run_before')}(node, life.number)")
                if all(k < own for k in node.inputs):
                    known = "".join(f"leaves[{k}], " for k in node.inputs)
                    with script.block("if leaves is not None:"):
                        script.line(f"node.leaves = ({known})")
                        with script.block("if ctx.inner:"):
                            inner = name(places_of_none, "places_of_none")
                            script.line(f"node.inner = {inner}(node.leaves)")
        with script.block(f"if not {name(keeps_graph, 'keeps_graph')}():"):  # create_graph, but not retained
            script.line(f"life.freed = {BEFORE}")
        script.line(f"return [{', '.join(f'r{i}' for i in range(self.gradients))}]")
        return script.function(", ".join(["ctx", "life", *(f"t{i}" for i in range(len(self.tangents)))]))[0]

    def _take_given(self, script: Script) -> dict[int, str]:
        """Takes what the node saved; the names of the inputs that nodes and gradients lead to."""
        ways, count, name = self.ways, len(self.given.tensors), script.names.name
        used = {k for node in self.nodes for k in node.inputs} | set(self.passed_on.values())
        own = len(ways.carried)
        names = {k: f"t{k - own}" if k >= own else f"i{k}" for k in used}
        names.update((k, f"s{j}") for k, j in enumerate(ways.carried) if j is not None)
        loose = [k for k in ways.loose if k in used]
        linked = f"{name(ways, 'ways')}.linked(ctx)"
        script.line("leaves = ctx.leaves")
        if count or not ways.loose:
            script.line(f"saved = {'ctx.saved_tensors' if count else '()'}")
        else:  # where nothing is saved, asking a second time would raise
            script.line(f"saved = ctx.saved_tensors if {linked} else ()")
        if ways.loose:
            with script.block(f"if len(saved) == {count}:"):
                with script.block("if leaves is None:"):
                    script.line(f"leaves = {name(find_leaves, 'find_leaves')}(ctx, {ways.positions})")
                nothing = name(NOTHING, "nothing")  # it requires grad no longer: anything will do
                for k in loose:
                    script.line(f"i{k} = {nothing} if leaves[{k}] is None else leaves[{k}]")
            with script.block("else:"):
                script.line(f"inputs = {name(ways, 'ways')}.inputs(ctx, saved, saved[{count}:])")
                for k in loose:
                    script.line(f"i{k} = inputs[{k}]")
                script.line(f"saved = saved[:{count}]")
        if count:
            script.line(f"{''.join(f's{i}, ' for i in range(count))}= saved")
        if self.given.sizes:
            numbers = "".join(f"n{i}, " for i in range(len(self.given.sizes)))
            script.line(f"{numbers}= sizes = ctx.sizes")
        return names

    def _compute(self, script: Script, places: list[str]) -> None:
        set_grad = script.names.name(set_grad_enabled, "set_grad")
        results = "".join(f"r{i}, " for i in range(self.results))
        script.line(f"{set_grad}(False)")
        with script.block("try:"):
            if self.program.inline is not None and self.autocast is None and not self.veiled:
                values = self.program.inline(script, places, keep_places=True)
                script.line(f"{results}= {''.join(f'{v}, ' for v in values)}")
            else:
                call = f"{script.names.name(self.program.call, 'program')}([{', '.join(places)}])"
                state = script.names.literal(self.autocast)
                with script.block("if True:" if self.autocast is None else f"with {state}.suspended():"):
                    script.line(f"{results}= {call}")
        with script.block("finally:"):
            script.line(f"{set_grad}(True)")


def _opened(script: Script, name: str, value: Any) -> list[str]:
    """The names of a tangent's parts, or its own."""
    return open_up(script, value.form, name) if type(value) is Bundle else [name]


def make_step(
    level: NextOrder,
    split: HigherSplit,
    program: Executable,
    backwards: Sequence[Executable | None],
    given: SavedSet,
    ways: Ways,
    state: AutocastState | None,
    steps: Steps,
) -> Any:
    """`program` is the backward itself, `backwards` are those of its gradients, by component."""
    numbers = {t.key: k for k, t in enumerate(level.recorded.component.targets)}
    places = {k: j for k, j in enumerate(ways.carried) if j is not None}  # input number to pool position
    tangents, position = level.recorded.tangents, len(given.tensors)
    for number, (t, key) in enumerate(zip(tangents, level.tangents, strict=True), len(ways.carried)):
        if type(t) is Value:
            places[number] = position
        position += len(values_of(t)) if t is not None else 0
        if key is not None:
            numbers[key] = number
    nodes = []
    for component, kept, saved, run in zip(level.components, split.kept, split.saved, backwards, strict=True):
        inputs = tuple(numbers[t.key] for t in component.targets)
        carried = tuple(kept.index(places[k]) if places.get(k) in kept else None for k in inputs)
        back = Ways(tuple(range(len(inputs))), carried)
        apply = _next_apply(level, component, saved, run, back, steps)
        nodes.append(NextNode(apply, component.exits, kept, inputs, bool(back.loose)))
    parts = sum(len(values_of(e.value)) for e in level.leaving)
    step = Step(
        program,
        level.count + len(split.program.results) - parts,
        level.count,
        given,
        ways,
        tuple(tangents),
        tuple(nodes),
        _borrowed(level, split.program),
        {i: numbers[key] for i, key in level.passed_on.items()},
        None if level.fixed_autocast else state,
        level.veiled,
    )
    return step.function()


def _next_apply(
    level: NextOrder,
    component: Component,
    saved: SavedSet,
    usual: Executable | None,
    ways: Ways,
    steps: Steps,
) -> Any:
    from aheadgrad.runtime.differentiable import Higher
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
        holding=() if level.veiled or level.lays_out else component.once,
        quiet=component.quiet,
        apart=component.apart,
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

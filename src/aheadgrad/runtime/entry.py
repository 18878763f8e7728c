"""The last stage: nodes, the entry function, and what stays of the compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.stage import Executables
from aheadgrad.conventions.wholes import backward_of_wholes, forward_of_wholes, unchanged_wholes
from aheadgrad.emit.script import Namespace
from aheadgrad.facts.facts import Fresh
from aheadgrad.options import Options
from aheadgrad.partition.split import SplitPrograms
from aheadgrad.program.slots import UpdatedInput
from aheadgrad.recording.captured import Captured
from aheadgrad.recording.components import Component
from aheadgrad.recording.exits import is_own
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.arrange import arranged
from aheadgrad.runtime.assemble import Assembled, Assembly, NodeCall, assemble, target_name
from aheadgrad.runtime.backward import Failure
from aheadgrad.runtime.backward_for import backward_for
from aheadgrad.runtime.differentiable import Higher
from aheadgrad.runtime.links import Ways
from aheadgrad.runtime.node import Direct, make_node
from aheadgrad.runtime.saved import SavedNames
from aheadgrad.runtime.sizes import SizeTexts
from aheadgrad.runtime.watch import watches
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, is_view_op
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import expression


@dataclass(eq=False)
class Entry:
    """A compiled entry: `run(*inputs)` gives the flat outputs."""

    assembled: Assembled
    source: str
    captured: Captured
    split: SplitPrograms
    executables: Executables
    journal: Journal

    @property
    def run(self) -> Callable[..., list[Any]]:
        return self.assembled.run


def make_entry(
    captured: Captured, split: SplitPrograms, compiled: Executables, options: Options, journal: Journal
) -> Entry:
    nodes, node_sources = [], []
    saved_names = SavedNames(captured, split)
    for number, component in enumerate(captured.joint.components):
        call, source = _node(captured, split, compiled, number, component, saved_names)
        nodes.append(call)
        node_sources.append(source)
    assembly = Assembly(
        facts=captured.facts,
        exits=captured.exits,
        passages=captured.joint.exits[len(captured.exits) :],
        inputs=len(captured.session.entrances) + len(captured.numbers),
        forward=_forward(captured, split, compiled),
        results=_results(captured, split),
        nodes=nodes,
        view_results=_view_results(captured),
        grad_before=captured.forward.grad_mode_before,
        inference=torch.is_inference_mode_enabled(),
        autocast=captured.autocast,
        in_graph_updates=captured.in_graph_updates,
        members=tuple(f"m{k}" for k in range(len(captured.session.members))),
        held_as_they_are=unchanged_wholes(captured),
        used_before=_used_before(captured),
        names=Namespace(SizeTexts(captured, _told_sizes(captured, split)) if captured.has_symbols else None),
    )
    returns = captured.call.returns
    if returns is not None:
        spec, names = captured.forward.out_spec, assembly.names
        assembly.returns = lambda texts: returns(spec, texts, names)
    assembled = assemble(assembly)
    source = "\n\n".join([assembled.source, *node_sources])
    return Entry(assembled, source, captured, split, compiled, journal)


def _told_sizes(captured: Captured, split: SplitPrograms) -> dict[Any, str]:
    """Sizes that values decide: which result of the forward is which."""
    results = _results(captured, split)
    made = captured.session.trace.numbers
    told = [(expression(number), name) for name, number in split.all_saved.sizes]
    return {expr: _size_name(split, results, name) for expr, name in told if expr in made}


def _used_before(captured: Captured) -> tuple[str, ...]:
    """Leaves whose gradients have the size that they enter with, though they leave with another."""
    found, offset = [], len(captured.forward.number_slots)
    for g in captured.gradients:
        for target, grad in zip(g.component.targets, g.grads, strict=False) if g is not None else ():
            fact = captured.facts.input(target.index) if target.kind == "input" else None
            if fact is None or fact.geometry is None or fact.history_changed or grad is None:
                continue
            if tuple(grad.size()) != tuple(fact.geometry.size) and target.leaf.is_leaf:
                found.append(f"p{target.index + offset}")
    return tuple(found)


def _forward(captured: Captured, split: SplitPrograms, compiled: Executables) -> Any:
    if not captured.session.veiled:
        return arranged(captured, compiled.forward)
    forward = compiled.forward
    return forward_of_wholes(captured, forward, len(split.forward.signature.outputs))


def _results(captured: Captured, split: SplitPrograms) -> int:
    """How many results the forward has, counting a tensor subclass as one."""
    opened = sum(len(values_of(e.value)) - 1 for e in captured.exits)
    return len(split.forward.signature.outputs) - opened


def _node(
    captured: Captured,
    split: SplitPrograms,
    compiled: Executables,
    number: int,
    component: Component,
    saved_names: SavedNames,
) -> tuple[NodeCall, str]:
    saved = split.saved[number]
    expected = captured.joint.expected_pattern(component)
    gradients = split.gradients[number]
    known = None
    run = compiled.backwards[number]
    if run is not None and gradients is not None and gradients.pattern == expected:
        known = backward_of_wholes(gradients, run, len(saved.tensors) + len(saved.sizes))

    watched = watches(captured, component, saved)
    tensor_names = [saved_names.of(component, s) for s in saved.tensors]
    forward = _forward(captured, split, compiled)
    direct = find_direct(captured, split, forward, component, watched, tensor_names)
    ways = _ways(captured, component, tensor_names, direct)
    apply, source = make_node(
        backward_for(captured, component, saved, known),
        len(component.exits),
        len(saved.tensors),
        len(saved.sizes),
        len(component.targets),
        str(number),
        ways=ways,
        higher=Higher(captured, component, saved, ways),
        watched=bool(watched),
        failure=Failure(captured.failures[number]) if number in captured.failures else None,
        direct=direct,
        fresh=tuple(name.startswith("r") for name in tensor_names),
        feeds=any(c.boundary for c in captured.joint.components),
    )
    size_names = [_size_name(split, _results(captured, split), name) for name, _ in saved.sizes]
    call = NodeCall(
        apply,
        component.exits,
        tensor_names,
        size_names,
        component.targets,
        direct is not None,
        bool(ways.loose),
        watched,
    )
    return call, source


def _ways(captured: Captured, component: Component, saved: list[str], direct: Direct | None) -> Ways:
    """How the node's backward finds its inputs again; not in saved ones that changed since."""
    if not captured.differentiable_again:
        return Ways((), ())
    reshaped = {f.index for f in captured.facts.inputs if f.geometry is not None or f.storage_changed}
    names = ["" if t.kind == "input" and t.index in reshaped else target_name(t) for t in component.targets]
    carried = tuple(saved.index(name) if name in saved else None for name in names)
    positions = direct.positions if direct is not None else tuple(range(len(names)))
    return Ways(positions, carried, bool(reshaped))


def _size_name(split: SplitPrograms, results: int, name: str) -> str:
    names = [n for n, _ in split.all_saved.sizes]
    outputs = results
    return f"r{outputs - len(names) + names.index(name)}"


def _view_results(captured: Captured) -> frozenset[int]:
    """Results that the graph makes with a view op although nobody else sees their base."""
    found = set()
    seen: set[int] = set()
    given_parts = captured.session.given_parts() if captured.session.veiled else {}
    for i, e in enumerate(captured.exits):
        if id(e.traced) in given_parts:
            continue
        if not isinstance(e.value, Tensor) or not (
            isinstance(e.slot, UpdatedInput) or is_own(captured.facts, e.slot)
        ):
            continue
        made = captured.session.trace.producer(e.value)
        if (
            made is None
            or _may_be_view(captured.session.trace.records[made.record].target)
            or id(e.value) in seen
        ):
            found.add(i)
        seen.add(id(e.value))
    return frozenset(found)


def _may_be_view(target: Any) -> bool:
    return is_view_op(target) or isinstance(target, HigherOrderOperator)


def find_direct(
    captured: Captured,
    split: SplitPrograms,
    forward: Any,
    component: Component,
    watched: list[Any],
    saved: list[str],
) -> Direct | None:
    """The direct form of the only node, for a call that has nothing to do around its program."""
    session = captured.session
    inline: Any = getattr(forward, "inline", None)
    plain = (
        inline is not None
        and captured.forward.grad_mode_before
        and captured.autocast is None
        and not (watched or session.members or captured.scalars or captured.facts.roots)
        and not split.all_saved.sizes
        and len(captured.joint.components) == 1
        and component.exits == list(range(len(captured.exits)))
        and all(t.kind == "input" for t in component.targets)
        and all(f.untouched for f in captured.facts.inputs)
        and captured.facts.ambient.grad_mode_after is None
        and all(isinstance(f, Fresh) and f.geometry is None for f in captured.facts.outputs)
    )
    if not plain or not component.targets:
        return None
    reached = {t.index for t in component.targets}
    if any(e.leaf.requires_grad and i not in reached for i, e in enumerate(session.entrances)):
        return None  # a node is linked to all its inputs, and a backward would go on to those in vain
    return Direct(
        inline,
        tuple(f"p{i}" for i in range(len(session.entrances))),
        tuple(t.index for t in component.targets),
        _results(captured, split),
        _view_results(captured),
        tuple(saved),
        len(component.exits),
    )

"""The last stage: nodes, the entry function, and what stays of the compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.eager import compile_eager
from aheadgrad.backends.registry import compile_program
from aheadgrad.backends.stage import Executables
from aheadgrad.capture.joint import Component, dense_order
from aheadgrad.capture.stage import Captured
from aheadgrad.conventions.subclasses import backward_of_wholes, forward_of_wholes, unchanged_wholes
from aheadgrad.errors import CaptureError, FallbackError, InvalidProgram
from aheadgrad.facts.facts import Fresh
from aheadgrad.options import Options
from aheadgrad.partition.split import SavedSet, SplitPrograms, backward_program
from aheadgrad.program.slots import UpdatedInput
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.arrange import arranged
from aheadgrad.runtime.assemble import Assembly, NodeCall, assemble
from aheadgrad.runtime.backward import Backward, Failure
from aheadgrad.runtime.emit import Namespace
from aheadgrad.runtime.node import Direct, make_node
from aheadgrad.runtime.padded import padded
from aheadgrad.runtime.saved import SavedNames
from aheadgrad.runtime.sizes import LaidOutBackward, SizeTexts
from aheadgrad.runtime.watch import is_own, watches
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, is_view_op
from aheadgrad.torchlayer.fake import assumptions
from aheadgrad.torchlayer.subclasses import Form, values_of


@dataclass(eq=False)
class Entry:
    """A compiled entry: `run(*inputs)` gives the flat outputs."""

    run: Callable[..., list[Any]]
    source: str
    captured: Captured
    split: SplitPrograms
    executables: Executables
    journal: Journal


def make_entry(
    captured: Captured, split: SplitPrograms, compiled: Executables, options: Options, journal: Journal
) -> Entry:
    nodes, node_sources = [], []
    saved_names = SavedNames(captured, split)
    for number, component in enumerate(captured.joint.components):
        call, source = _node(captured, split, compiled, options, number, component, saved_names)
        nodes.append(call)
        node_sources.append(source)
    assembly = Assembly(
        facts=captured.facts,
        exits=captured.exits,
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
        names=Namespace(SizeTexts(captured) if captured.has_symbols else None),
    )
    returns = captured.call.returns
    if returns is not None:
        spec, names = captured.forward.out_spec, assembly.names
        assembly.returns = lambda texts: returns(spec, texts, names)
    run, source = assemble(assembly)
    return Entry(run, "\n\n".join([source, *node_sources]), captured, split, compiled, journal)


def _forward(captured: Captured, split: SplitPrograms, compiled: Executables) -> Any:
    if not captured.session.veiled:
        return arranged(captured, compiled.forward)
    if captured.numbers:
        raise FallbackError("symbolic numbers are given beside tensor subclasses")
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
    options: Options,
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

    def make(pattern: Any, state: AutocastState | None) -> Any:
        return _make_backward(captured, options, component, saved, known, pattern, state)

    watched = watches(captured, component, saved)
    tensor_names = [saved_names.of(component, s) for s in saved.tensors]
    forward = _forward(captured, split, compiled)
    direct = find_direct(captured, split, forward, component, watched, tensor_names)
    runs = _backward(captured, component, expected, known, make)
    apply, source = make_node(
        runs,
        len(component.exits),
        len(saved.tensors),
        len(saved.sizes),
        len(component.targets),
        number,
        bool(watched),
        Failure(captured.failures[number]) if number in captured.failures else None,
        direct,
    )
    size_names = [_size_name(split, _results(captured, split), name) for name, _ in saved.sizes]
    call = NodeCall(
        apply,
        component.exits,
        tensor_names,
        size_names,
        component.targets,
        direct is not None,
        watched,
    )
    return call, source


def _backward(
    captured: Captured, component: Component, expected: Any, known: Any, make: Callable[..., Any]
) -> Backward:
    if not captured.has_symbols and not captured.options.one_node:
        return Backward(expected, known, make, captured.fixed_autocast)

    def make_for(present: tuple[bool, ...], state: AutocastState | None) -> Any:
        before = assumptions(captured.session.mode)
        pattern = tuple(e if there else None for e, there in zip(expected, present, strict=True))
        made = make(pattern, state)
        if assumptions(captured.session.mode) != before:
            raise CaptureError(
                "A backward for a part of the outputs takes different ways for different sizes. Compile "
                "without dynamic shapes, or differentiate all outputs together."
            )
        return made

    traced = [captured.exits[i].traced for i in component.exits]
    orders = tuple(
        e if isinstance(e, Form) else dense_order(t) for e, t in zip(expected, traced, strict=True)
    )
    return LaidOutBackward(orders, known, make_for, captured.fixed_autocast)


def _make_backward(
    captured: Captured,
    options: Options,
    component: Component,
    saved: SavedSet,
    known: Any,
    pattern: Any,
    state: AutocastState | None,
) -> Any:
    """A backward for a pattern of tangents that was not seen before."""
    state = captured.backward_autocast if captured.fixed_autocast else state
    by_subclasses = not captured.session.veiled and any(isinstance(p, Form) for p in pattern)
    if by_subclasses:  # recorded for plain tangents; what its ops mean is up to those given
        pattern = tuple(p.stride if isinstance(p, Form) else p for p in pattern)
    try:
        gradients = captured.record(component, pattern, state)
    except Exception as error:
        return Failure(error)
    try:
        program = backward_program(captured, gradients, saved)
        if by_subclasses:
            return compile_eager(program)
        run = compile_program(options.backend, program)
        return backward_of_wholes(gradients, run, len(saved.tensors) + len(saved.sizes))
    except InvalidProgram:
        if known is None or options.partition == "default" or captured.has_symbols:
            raise
        outputs = [captured.exits[i].value for i in component.exits]
        return padded(known, outputs, captured.joint.expected_pattern(component), pattern)


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
            isinstance(e.slot, UpdatedInput) or is_own(captured, e.slot)
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
    return Direct(
        inline,
        tuple(f"p{i}" for i in range(len(session.entrances))),
        tuple(t.index for t in component.targets),
        _results(captured, split),
        _view_results(captured),
        tuple(saved),
        len(component.exits),
    )

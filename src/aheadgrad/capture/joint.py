"""Gradients in the same trace: tangents are made after the forward, when the outputs are known.

Outputs whose histories have nothing in common form separate components, each with its own
backward. A backward is recorded for a pattern: which tangents exist and how they are laid out.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aheadgrad.capture.exits import Exit
from aheadgrad.capture.layouts import contiguous_strides
from aheadgrad.capture.session import Session
from aheadgrad.capture.subclasses import expected_tangent, tangent_like
from aheadgrad.capture.writes import BackwardWrites
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import no_function_modes
from aheadgrad.torchlayer.subclasses import is_foreign, parts_of, values_of
from aheadgrad.torchlayer.symbols import is_symbolic, size_hint

Layout = tuple[Any, ...] | None
Pattern = tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class Target:
    """Something a gradient is taken of: an input, a tensor inside of one, or a leaf made inside.

    `name` is what a tensor inside of an input is called in generated code.
    """

    kind: str
    index: int
    leaf: Tensor
    name: str = ""


@dataclass(eq=False)
class Component:
    """Outputs with a common history, and the inputs they lead back to."""

    exits: list[int]
    targets: list[Target]
    nodes: set[Any] = field(default_factory=set)
    other_leaves: list[Tensor] = field(default_factory=list)
    nodes_of: dict[int, set[Any]] = field(default_factory=dict)


@dataclass(eq=False)
class Gradients:
    """What one backward computes: from tangents (values, None where absent) to gradients."""

    component: Component
    pattern: Pattern
    tangents: list[Any]
    grads: list[Any]
    phase: str


class Joint:
    """The forward's exits and the inputs to differentiate, in one session."""

    def __init__(self, session: Session, exits: list[Exit], targets: list[Target], *, one_node: bool) -> None:
        self.session = session
        self.exits = exits
        self.recorded = 0
        self.forms: dict[int, Any] = {}  # of the tangents that we expect for subclasses
        differentiable = [i for i, e in enumerate(exits) if e.differentiable]
        self.components = _components(exits, differentiable, targets, one_node)

    def expected_pattern(self, component: Component) -> Pattern:
        """All tangents present, laid out like the outputs."""
        return tuple(self._expected(i) for i in component.exits)

    def _expected(self, i: int) -> Any:
        traced = self.exits[i].traced
        if not is_foreign(traced):
            return tangent_layout(traced)
        if i not in self.forms:
            with self.session.recording():
                self.forms[i] = expected_tangent(self.session, traced)
        return self.forms[i]

    def record(
        self, component: Component, pattern: Pattern, targets: list[Target] | None = None, around: Any = None
    ) -> Gradients:
        """Records a backward; raises what eager would raise in that backward."""
        session = self.session
        self.recorded += 1
        session.trace.phase = phase = f"backward {self.recorded}"
        wanted = component.targets if targets is None else targets
        leaves = [t.leaf for t in wanted] + component.other_leaves
        try:
            with session.running(), session.disguises.off(), around or nullcontext():
                tangents, wrapped = self._tangents(component, pattern)
                given = [v for t in tangents if t is not None for v in values_of(t)]
                known = [w for t in wrapped for w in parts_of(t)]
                writes = BackwardWrites(session, list(zip(given, known, strict=True)))
                present = [i for i, p in zip(component.exits, pattern, strict=True) if p is not None]
                raw = _gradients([self.exits[i].traced for i in present], leaves, wrapped)
                session.trace.read_off = len(session.trace.records)
                grads = []
                for g in raw[: len(wanted)]:
                    if g is not None:
                        session.settle_gradient(g)
                        functional.sync(g)
                        g = functional.unwrap(g)
                    grads.append(g)
                writes.record()
        finally:
            session.trace.phase = "forward"
        return Gradients(component, pattern, tangents, grads, phase)

    def _tangents(self, component: Component, pattern: Pattern) -> tuple[list[Any], list[Tensor]]:
        values: list[Any] = []
        wrapped = []
        for i, layout in zip(component.exits, pattern, strict=True):
            if layout is None:
                values.append(None)
                continue
            value, seen = tangent_like(self.session, self.exits[i].traced, layout)
            values.append(value)
            wrapped.append(seen)
        return values, wrapped


def _gradients(outputs: list[Tensor], leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    if not leaves:  # nothing to reach, but the way there may raise
        with no_function_modes():
            torch.autograd.backward(outputs, tangents, retain_graph=True)
        return ()
    return torch.autograd.grad(outputs, leaves, grad_outputs=tangents, allow_unused=True, retain_graph=True)


def tangent_layout(t: Tensor) -> tuple[Any, ...]:
    """The strides we expect a tangent to have: the output's, if those are dense."""
    stride = tuple(t.stride())
    size = tuple(t.size())
    if any(map(is_symbolic, (*size, *stride))):
        return dense_strides(size, dense_order(t))
    dense = 1
    for n, s in sorted(zip(size, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if n == 1:
            continue
        if s != dense:
            return contiguous_strides(size)
        dense = dense * n
    return stride


def dense_order(t: Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost, going by recorded sizes."""
    return order_of(t.stride())


def order_of(stride: Any) -> tuple[int, ...]:
    strides = [size_hint(s) for s in stride]
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def dense_strides(size: tuple[Any, ...], order: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides without gaps for dimensions in this order in memory."""
    strides: list[Any] = [1] * len(size)
    step: Any = 1
    for d in reversed(order):
        strides[d] = step
        step = step * size[d]
    return tuple(strides)


def _components(
    exits: list[Exit], differentiable: list[int], targets: list[Target], one_node: bool
) -> list[Component]:
    """Groups the outputs by what their histories have in common."""
    unreachable = [] if one_node else [i for i in differentiable if exits[i].unreachable]
    differentiable = [i for i in differentiable if i not in unreachable]
    reach = {i: _reach(exits[i].traced.grad_fn) for i in differentiable}
    groups: list[tuple[list[int], set[Any]]] = []
    for i in differentiable:
        members, nodes = [i], reach[i][0]
        rest = []
        for group in groups:
            if one_node or group[1] & nodes:
                members, nodes = group[0] + members, group[1] | nodes
            else:
                rest.append(group)
        groups = [*rest, (members, nodes)]
    components = [_component(sorted(m), nodes, reach, targets) for m, nodes in groups]
    components += [Component([i], [], nodes_of={i: set()}) for i in unreachable]
    return sorted(components, key=lambda c: c.exits[0])


def _component(
    members: list[int], nodes: set[Any], reach: dict[int, Any], targets: list[Target]
) -> Component:
    leaves = {id(leaf): leaf for i in members for leaf in reach[i][1]}
    wanted = [t for t in targets if id(t.leaf) in leaves]
    known = {id(t.leaf) for t in targets}
    others = [leaf for key, leaf in leaves.items() if key not in known]
    return Component(members, wanted, nodes, others, {i: reach[i][0] for i in members})


def _reach(start: Any) -> tuple[set[Any], list[Tensor]]:
    """The autograd nodes behind an output, and the leaves at their ends."""
    nodes: set[Any] = set()
    leaves: list[Tensor] = []
    stack = [start]
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
            continue
        if type(node).__name__ != "EnterBackward":
            nodes.add(node)
        stack.extend(n for n, _ in node.next_functions)
    return nodes, leaves

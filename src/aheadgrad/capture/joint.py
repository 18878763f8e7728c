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
from aheadgrad.capture.session import Session
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.fake import FakeTensor

Layout = tuple[Any, ...] | None
Pattern = tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class Target:
    """Something a gradient is taken of: an input, or a leaf made inside."""

    kind: str
    index: int
    leaf: Tensor


@dataclass(eq=False)
class Component:
    """Outputs with a common history, and the inputs they lead back to."""

    exits: list[int]
    targets: list[Target]
    nodes: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class Gradients:
    """What one backward computes: from tangents (values, None where absent) to gradients."""

    component: Component
    pattern: Pattern
    tangents: list[FakeTensor | None]
    grads: list[Any]
    phase: str


class Joint:
    """The forward's exits and the inputs to differentiate, in one session."""

    def __init__(self, session: Session, exits: list[Exit], targets: list[Target], *, one_node: bool) -> None:
        self.session = session
        self.exits = exits
        self.recorded = 0
        differentiable = [i for i, e in enumerate(exits) if e.differentiable]
        self.components = _components(exits, differentiable, targets, one_node)

    def expected_pattern(self, component: Component) -> Pattern:
        """All tangents present, laid out like the outputs."""
        return tuple(tangent_layout(self.exits[i].traced) for i in component.exits)

    def record(
        self, component: Component, pattern: Pattern, targets: list[Target] | None = None, around: Any = None
    ) -> Gradients:
        """Records a backward; raises what eager would raise in that backward."""
        session = self.session
        self.recorded += 1
        session.trace.phase = phase = f"backward {self.recorded}"
        wanted = component.targets if targets is None else targets
        if not wanted:
            tangents = [None] * len(component.exits)
            return Gradients(component, pattern, tangents, [], phase)  # type: ignore[arg-type]
        try:
            with session.running(), around or nullcontext():
                tangents, wrapped = self._tangents(component, pattern)
                present = [i for i, layout in zip(component.exits, pattern, strict=True) if layout is not None]
                raw = torch.autograd.grad(
                    [self.exits[i].traced for i in present],
                    [t.leaf for t in wanted],
                    grad_outputs=wrapped,
                    allow_unused=True,
                    retain_graph=True,
                )
                grads = []
                for g in raw:
                    if g is not None:
                        functional.sync(g)
                        g = functional.unwrap(g)
                    grads.append(g)
        finally:
            session.trace.phase = "forward"
        return Gradients(component, pattern, tangents, grads, phase)

    def _tangents(self, component: Component, pattern: Pattern) -> tuple[list[Any], list[Tensor]]:
        values: list[FakeTensor | None] = []
        wrapped = []
        for i, layout in zip(component.exits, pattern, strict=True):
            if layout is None:
                values.append(None)
                continue
            like = self.exits[i].traced
            with functional.outside():
                room = torch.empty_strided(like.size(), layout, dtype=like.dtype, device="meta")
                value = FakeTensor(self.session.mode, room, like.device)
            values.append(value)
            wrapped.append(functional.wrap(value))
        return values, wrapped


def tangent_layout(t: Tensor) -> tuple[Any, ...]:
    """The strides we expect a tangent to have: the output's, if those are dense."""
    stride = tuple(t.stride())
    size = tuple(t.size())
    dense = 1
    for n, s in sorted(zip(size, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if n == 1:
            continue
        if s != dense:
            return contiguous_strides(size)
        dense = dense * n
    return stride


def contiguous_strides(size: tuple[Any, ...]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for n in reversed(size):
        strides.append(step)
        step = step * (n if not isinstance(n, int) else max(n, 1))
    return tuple(reversed(strides))


def _components(
    exits: list[Exit], differentiable: list[int], targets: list[Target], one_node: bool
) -> list[Component]:
    if not differentiable:
        return []
    if one_node:
        nodes = set().union(*(_reach(exits[i].traced.grad_fn)[0] for i in differentiable))
        return [Component(differentiable, list(targets), nodes)]
    by_leaf = {id(t.leaf): t for t in targets}
    groups: list[tuple[list[int], set[Any], dict[int, Target]]] = []
    for i in differentiable:
        nodes, leaves = _reach(exits[i].traced.grad_fn)
        found = {id(v): by_leaf[id(v)] for v in leaves if id(v) in by_leaf}
        merged: tuple[list[int], set[Any], dict[int, Target]] = ([i], nodes, found)
        rest = []
        for group in groups:
            if group[1] & merged[1]:
                merged = (group[0] + merged[0], group[1] | merged[1], {**group[2], **merged[2]})
            else:
                rest.append(group)
        groups = [*rest, merged]
    order = {id(t.leaf): k for k, t in enumerate(targets)}
    components = [
        Component(sorted(members), sorted(found.values(), key=lambda t: order[id(t.leaf)]), nodes)
        for members, nodes, found in groups
    ]
    return sorted(components, key=lambda c: c.exits[0])


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

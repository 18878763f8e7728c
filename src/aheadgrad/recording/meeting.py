"""Backwards that meet: where that of a gradient gets to what the gradient was computed from.

    energy = f(x);  force = grad(energy, x);  loss(energy, force).backward()

Autograd goes back from `force` through its own history and into that of `energy`, and adds up there what
comes from both sides. Two backwards that know nothing of each other would both go back from there. So that of
`force` can be recorded up to the ends of its own history, and that of `energy` with what comes in there.
An order in between that nobody holds any more (a second derivative of which only the third is kept) will not
have a backward of its own: its history counts as that of the order above it.
"""

from __future__ import annotations

from typing import Any

from aheadgrad.errors import CaptureError
from aheadgrad.joint.requests import Request
from aheadgrad.recording.components import Component, Passage, Target, beyond
from aheadgrad.recording.joint import Gradients
from aheadgrad.recording.orders import Derivative
from aheadgrad.recording.walks import Edge, walk
from aheadgrad.torchlayer.autograd import edge_metadata, number_of

Ends = list[tuple[int, int]]
"""Of each end how many orders below it lies, and its number there."""


def record_handing(level: Any, component: Component, pattern: Any, state: Any, request: Request) -> Any:
    """A backward that takes what is handed to it, and hands on; the gradients and the ends."""
    if component.boundary:
        raise CaptureError("parts of calls have backwards of their own")
    below = _orders_below(level)[request.hands - 1 :] if request.hands else []
    found = _ends(below, component, request) if below else {}
    wanted = request.wanted or (True,) * len(component.targets)
    cut = component
    if found:
        ends = [Target("exit", -1, _passage(edge)) for edge in found]
        own = component.nodes - below[0][1].nodes
        cut = Component(component.exits, [*component.targets, *ends], own)
        cut.beyond = beyond(cut)
        wanted = (*wanted, *(True for _ in ends))
    places = [_passage(level.joint.inner[number]) for number in request.handed]
    gradients: Gradients = level.joint.record(cut, pattern, state, None, wanted, places)
    return gradients, list(found.values())


def _passage(edge: Edge) -> Passage:
    node, number = edge
    return Passage(node, number, *edge_metadata(node, number))


def _orders_below(level: Derivative) -> list[tuple[Any, Component]]:
    """Each order below, nearest first, and the part of it that the gradients belong to."""
    found = [(level.below, level.recorded.component)]
    while isinstance(found[-1][0], Derivative):
        found.append((found[-1][0].below, found[-1][0].recorded.component))
    return found


def _ends(
    below: list[tuple[Any, Component]], component: Component, request: Request
) -> dict[Edge, tuple[int, int]]:
    """Where the history of a gradient leads into that of these orders, on the way to wanted targets."""
    wanted = request.wanted
    asked = {id(t.leaf) for k, t in enumerate(component.targets) if wanted is None or wanted[k]}
    nodes = below[0][1].nodes
    found: dict[Edge, tuple[int, int]] = {}
    for node in sorted(component.nodes - nodes, key=number_of):
        for edge in node.next_functions:
            if edge[0] not in nodes or edge in found:
                continue
            if not any(id(leaf) in asked for leaf in walk(edge).leaves):
                continue
            depth = max(k for k, (_, part) in enumerate(below) if edge[0] in part.nodes)
            owner, part = below[depth]
            if part.boundary:
                raise CaptureError("a call in parts has several backwards")
            if edge not in owner.joint.inner:
                owner.joint.inner.append(edge)
            found[edge] = request.hands - 1 + depth, owner.joint.inner.index(edge)
    return found

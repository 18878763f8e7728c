"""Gradients in the same trace: tangents are made after the forward, when the outputs are known.

Each component (see `components`) has its own backward. A backward is recorded for a pattern: which tangents
exist and how they are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from aheadgrad.recording.any_size import for_any_size
from aheadgrad.recording.backward_writes import BackwardWrites
from aheadgrad.recording.components import Component, Components, Passage, Target
from aheadgrad.recording.exits import Exit, GrownView
from aheadgrad.recording.geometry import contiguous_strides
from aheadgrad.recording.overlaps import is_dense
from aheadgrad.recording.session import Session
from aheadgrad.recording.subclass_borders import expected_tangent, tangent_like
from aheadgrad.recording.walks import edge_of
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autocast import AutocastState, autocast_as
from aheadgrad.torchlayer.autograd import run_backward, set_grad_enabled
from aheadgrad.torchlayer.formulas import of_plain_tensors
from aheadgrad.torchlayer.strides import dense_strides, order_of
from aheadgrad.torchlayer.subclasses import is_foreign, parts_of, values_of
from aheadgrad.torchlayer.symbols import is_symbolic
from aheadgrad.torchlayer.wanted import Wanted

Layout = tuple[Any, ...] | None
Pattern = tuple[Layout, ...]


@dataclass(eq=False)
class Gradients:
    """What one backward computes: from tangents (values, None where absent) to gradients (None where not
    wanted)."""

    component: Component
    pattern: Pattern
    tangents: list[Any]
    grads: list[Any]
    phase: str
    traced: Traced | None = None
    wanted: Wanted = None
    handed: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Traced:
    """The tangents and gradients of a backward that can be differentiated again, as autograd sees them."""

    tangents: list[Tensor | None]
    grads: list[Tensor | None]


class Joint:
    """The forward's exits and the inputs to differentiate, in one session."""

    def __init__(
        self,
        session: Session,
        exits: list[Exit],
        targets: list[Target],
        *,
        one_node: bool,
        cut: int = 0,
        join: bool = False,
        views: Sequence[GrownView] = (),
    ) -> None:
        self.session = session
        self.exits = list(exits)  # and the passages between components
        found = Components(self.exits, targets)
        self.components = found.find(one_node=one_node, cut=cut, join=join, views=views)
        self.inner: list[Any] = []  # edges where other backwards may come in (`meeting`)
        self.forms: dict[int, Any] = {}  # of the tangents that we expect for subclasses

    def expected_pattern(self, component: Component) -> Pattern:
        """All tangents present, laid out like the outputs."""
        return tuple(self.expected(i) for i in component.exits)

    def expected(self, i: int) -> Any:
        """The layout of the tangent of one exit, or its form."""
        traced = self.exits[i].traced
        if not is_foreign(traced):
            return tangent_layout(traced)
        if i not in self.forms:
            with self.session.recording():
                self.forms[i] = expected_tangent(self.session, traced)
        return self.forms[i]

    def record(
        self,
        component: Component,
        pattern: Pattern,
        state: AutocastState | None,
        requiring: tuple[bool, ...] | None = None,
        wanted: Wanted = None,
        handed: Sequence[Passage] = (),
    ) -> Gradients:
        """Records a backward; raises what eager would raise in that backward.

        With `requiring` (which tangents require grad) as under `create_graph=True`: the gradients
        have a history of their own. With `wanted` as `autograd.grad` for these targets. `handed`
        are places at which further tangents come in.
        """

        def attempt() -> Gradients:
            return self._record(component, pattern, state, requiring, wanted, handed)

        return self.session.following(lambda: for_any_size(self.session, attempt))

    def _record(
        self,
        component: Component,
        pattern: Pattern,
        state: AutocastState | None,
        requiring: tuple[bool, ...] | None,
        wanted: Wanted,
        handed: Sequence[Passage],
    ) -> Gradients:
        session = self.session
        session.trace.backwards += 1
        session.trace.phase = phase = f"backward {session.trace.backwards}"
        leaves = _leaves_of(component, wanted)
        try:
            with session.running(), session.ledger.undisguised(), autocast_as(state):
                tangents, wrapped = self._tangents(component, pattern)
                if requiring is not None:
                    set_grad_enabled(True)
                    for t, required in zip(wrapped, requiring, strict=True):
                        if t is not None:
                            t.requires_grad_(required)
                inside = [tangent_like(session, p, p.stride()) for p in handed]  # type: ignore[arg-type]
                given = [v for t in tangents if t is not None for v in values_of(t)]
                given += [value for value, _ in inside]
                session.values.meet(given)
                known = [w for t in wrapped if t is not None for w in parts_of(t)]
                known += [seen for _, seen in inside]
                changeable = list(zip(given, known, strict=True))
                writes = BackwardWrites(session, changeable, component, self.exits)
                present = [i for i, p in zip(component.exits, pattern, strict=True) if p is not None]
                seeds = [w for w in wrapped if w is not None] + [seen for _, seen in inside]
                outputs = [_root(self.exits[i].traced) for i in present] + list(map(_root, handed))
                with component.closed() if component.boundary else nullcontext():
                    with session.lifting.only_reads(), of_plain_tensors(component.nodes):
                        raw = run_backward(outputs, leaves, seeds, create_graph=requiring is not None) or ()
                session.trace.read_off = len(session.trace.records)
                raw = _spread(raw, component, wanted)
                grads = [None if g is None else _latest(session, g) for g in raw]
                writes.record()
        finally:
            session.trace.phase = "forward"
        session.open_sizes.check()
        traced = None if requiring is None else Traced(wrapped, raw)
        met = [value for value, _ in inside]
        return Gradients(component, pattern, tangents, grads, phase, traced, wanted, met)

    def _tangents(self, component: Component, pattern: Pattern) -> tuple[list[Any], list[Any]]:
        values: list[Any] = []
        wrapped: list[Tensor | None] = []
        for i, layout in zip(component.exits, pattern, strict=True):
            if layout is None:
                values.append(None)
                wrapped.append(None)
                continue
            value, seen = tangent_like(self.session, self.exits[i].traced, layout)
            values.append(value)
            wrapped.append(seen)
        return values, wrapped


def _leaves_of(component: Component, wanted: Wanted) -> list[Any]:
    """Where a backward is to go."""
    if wanted is None:
        return [t.place for t in component.targets] + component.other_leaves
    return [t.place for t, asked in zip(component.targets, wanted, strict=True) if asked]


def _spread(found: Sequence[Any], component: Component, wanted: Wanted) -> list[Any]:
    """A gradient, or None, for each target."""
    rest = iter(found)
    return [next(rest) if asked else None for asked in wanted or (True,) * len(component.targets)]


def _latest(session: Session, traced: Tensor) -> Any:
    session.settle_gradient(traced)
    return functional.latest(traced)


def _root(traced: Any) -> Any:
    return GradientEdge(*edge_of(traced)) if isinstance(traced, Passage) else traced


def tangent_layout(t: Tensor) -> tuple[Any, ...]:
    """The strides we expect a tangent to have: the output's, if those are dense."""
    size, stride = tuple(t.size()), tuple(t.stride())
    if any(map(is_symbolic, (*size, *stride))):
        return dense_strides(size, dense_order(t))
    return stride if is_dense(t) else contiguous_strides(size)


def dense_order(t: Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost, going by recorded sizes."""
    return order_of(t.stride())

"""Lowering what a recording found: entrances, exits, components and gradients become values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.joint import level as values
from aheadgrad.joint.level import SAVED_BY_DATA, slots_apart
from aheadgrad.program.slots import Slot
from aheadgrad.program.values import Value, Write
from aheadgrad.recording.components import Component, Passage, Target
from aheadgrad.recording.exits import Exit
from aheadgrad.recording.histories import (
    holds_something,
    in_order,
    is_spoiled,
    saved_storages,
    saved_with_history,
    saves_same_counter,
)
from aheadgrad.recording.joint import Gradients, dense_order
from aheadgrad.recording.lower_values import Lowering, frozen_numbers_in
from aheadgrad.recording.orders import Derivative
from aheadgrad.recording.recording import Recording
from aheadgrad.recording.walks import edge_of, lead_elsewhere, leaves_behind
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import base_of, is_view
from aheadgrad.torchlayer.subclasses import Form, parts_of, values_of
from aheadgrad.torchlayer.symbols import as_number, frozen_numbers, is_symbolic

aten = torch.ops.aten


def lower(recording: Recording) -> values.Joint:
    """The first level as a value. Raises for what eager checks at run time and an entry could not."""
    low, options, session = recording.lowering, recording.options, recording.session
    entrances = tuple(
        values.Entrance(
            e.slot,
            low.frozen(e.value),
            e.leaf.requires_grad,
            low.memory(functional.storage_key(e.seen)),
            None if (item := session.items.get(id(e.real))) is None else as_number(item),
            e.is_static,
        )
        for e in session.entrances
    )
    again = options.any_order and not options.one_node
    levels = _Levels(recording, keeps=again)
    members = tuple(m.version is not None for m in session.members)
    wholes: list[tuple[Slot, Any]] = [(e.slot, e.value) for e in entrances]
    for place, scalar in reversed(recording.scalars):
        given = as_number(scalar.value) if is_symbolic(scalar.value) else scalar.value
        wholes.insert(place, (scalar.slot, given))
    roots = [low.memory(functional.storage_key(t)) for t in recording.aliases.root_tensors]
    return values.Joint(
        *levels.common(saves=True),  # type: ignore[call-arg]
        frozen_numbers_in(recording.facts) if recording.has_symbols else recording.facts,
        entrances,
        members,
        tuple(wholes),
        tuple(map(as_number, recording.numbers)),
        tuple(roots),
        recording.in_graph_updates,
        _writes(recording),
        recording.autocast,
        recording.forward.grad_mode_before,
    )


def lower_next(derivative: Derivative) -> values.NextOrder:
    """A derivative as a value."""
    levels = _Levels(derivative, keeps=True)
    traced = derivative.recorded.traced
    assert traced is not None
    key = derivative.lowering.key
    asked = [t is not None and t.requires_grad for t in traced.tangents]
    recorded = lower_gradients(derivative.below, derivative.recorded)
    passed = {i: t for i in range(len(derivative.exits)) if (t := derivative.passed_on(i)) is not None}
    return values.NextOrder(
        *levels.common(saves=False),  # type: ignore[call-arg]
        recorded,
        tuple(e.slot for e in derivative.below.joint.exits),
        tuple(key(t) if wanted else None for t, wanted in zip(traced.tangents, asked, strict=True)),
        {i: key(t.leaf) for i, t in passed.items()},
    )


def lower_gradients(level: Any, g: Gradients) -> values.Gradients:
    """One recorded backward as a value."""
    number = next(k for k, c in enumerate(level.joint.components) if c is g.component)
    low, frozen = level.lowering, level.components[number]
    expected = level.joint.expected_pattern(g.component)
    tangents, grads = tuple(map(low.frozen, g.tangents)), tuple(map(low.frozen, g.grads))
    usual = g.pattern == expected and g.wanted is None
    return values.Gradients(frozen, tangents, grads, g.phase, usual)


def _writes(recording: Recording) -> tuple[Write, ...]:
    """The updates kept inside the graph, in the order of the inputs."""
    found = []
    session, low = recording.session, recording.lowering
    for fact in recording.facts.inputs:
        if fact.index in recording.in_graph_updates:
            entrance = session.entrances[fact.index]
            value = low.frozen(entrance.value)
            new = low.frozen(functional.unwrap(session.ledger.current(entrance.seen)))
            if fact.storage_changed:
                found.append(Write(aten.set_.source_Tensor, value, new))
            elif fact.data_changed:
                found.append(Write(aten.copy_.default, value, new))
    return tuple(found)


class _Levels:
    """Lowers what all orders have in common. `keeps`: also what eager keeps for derivatives of these."""

    def __init__(self, level: Any, *, keeps: bool) -> None:
        self.level = level
        self.low: Lowering = level.lowering
        self.session = level.session
        self.keeps = keeps

    def common(self, *, saves: bool) -> tuple[Any, ...]:
        level, joint = self.level, self.level.joint
        tape = self.low.tape()
        reached = {i for c in joint.components for i in c.exits}
        given = self.session.given_parts() if self.session.veiled else {}
        exits = tuple(self._exit(i, e, i in reached, given) for i, e in enumerate(joint.exits))
        level.components = tuple(self._component(k, c, saves=saves) for k, c in enumerate(joint.components))
        gradients = tuple(None if g is None else lower_gradients(level, g) for g in level.gradients)
        return (
            level.order,
            tape,
            exits,
            len(level.exits),
            level.components,
            gradients,
            dict(level.failures),
            level.options,
            level.has_symbols,
            self.session.veiled,
            level.backward_autocast,
            level.fixed_autocast,
            level.fixed_sizes,
        )

    def _exit(self, number: int, e: Exit, reached: bool, given: dict[int, str]) -> values.Exit:
        traced = e.traced
        if isinstance(traced, Passage):
            size, stride = frozen_numbers(traced.shape), frozen_numbers_in(self._expected(number))
            look = stride, dense_order(traced), size, traced.dtype, traced.device  # type: ignore[arg-type]
            return values.Exit(e.slot, None, e.differentiable, None, *look, passage=True)
        value = self.low.frozen(e.value)
        if not isinstance(traced, Tensor):
            return values.Exit(e.slot, value, e.differentiable)
        memory = self.low.memory(functional.storage_key(traced))
        expected: Any = None
        order: tuple[int, ...] = ()
        if reached:
            expected = self._expected(number)
            order = () if isinstance(expected, Form) else dense_order(traced)
        own = tuple(id(part) in given for part in parts_of(traced)) if given else ()
        size = frozen_numbers(traced.size())
        look = frozen_numbers_in(expected), order, size, traced.dtype, traced.device
        return values.Exit(e.slot, value, e.differentiable, memory, *look, given=own)

    def _expected(self, number: int) -> Any:
        return self.level.joint.expected(number)

    def _component(self, number: int, c: Component, *, saves: bool) -> values.Component:
        expected = tuple(frozen_numbers_in(self._expected(i)) for i in c.exits)
        kept = self._kept(c.nodes) if self.keeps and c.targets else ()
        keeps = tuple(sorted(kept, key=lambda v: v.number))  # the same in every process
        if saves and any(map(is_spoiled, self._beside(c))):
            raise FallbackError("a tensor is changed that is saved for derivatives of nothing that was given")
        saved: list[frozenset[int]] = []
        if saves and any(saves_same_counter(c.nodes, t) for t in self._apart()):
            raise FallbackError(SAVED_BY_DATA)
        for i in c.exits if saves else ():
            keys = saved_storages(self.session, c.nodes_of[i])
            saved.append(frozenset(map(self.low.memory, keys)))
        once = tuple(k for k, i in enumerate(c.exits) if any(map(holds_something, c.nodes_of[i])))
        targets = tuple(map(self._target, c.targets))
        alone = tuple(k for k, i in enumerate(c.exits) if not self._has_siblings(c, i))
        quiet = alone if len(c.exits) > 1 else ()
        apart = len({leaves_behind(c.nodes_of[i]) for i in c.exits}) > 1
        bases = {id(base_of(leaf)) for leaf in c.other_leaves if is_view(leaf)}
        viewed = tuple(k for k, e in enumerate(self.session.entrances) if id(e.seen) in bases)
        told = tuple(saved), once, quiet, apart, viewed
        return values.Component(number, tuple(c.exits), targets, expected, keeps, *told)

    def _apart(self) -> list[Tensor]:
        """Results with a version counter of their own."""
        slots = slots_apart(self.level.facts)
        return [e.traced for e in self.level.joint.exits if e.slot in slots] if slots else []

    def _beside(self, c: Component) -> list[Any]:
        """Nodes whose derivatives no target gets."""
        leaves = {id(t.leaf) for t in c.targets if not t.is_boundary}
        return lead_elsewhere(c.nodes, leaves, {edge_of(t.leaf) for t in c.boundary})

    def _has_siblings(self, c: Component, i: int) -> bool:
        """Are there other exits that lead to the node which made this one?"""
        node = self.level.joint.exits[i].traced.grad_fn
        return any(node in nodes for j, nodes in c.nodes_of.items() if j != i)

    def _kept(self, nodes: Iterable[Any]) -> dict[Value, None]:
        """Values with a history that torch's own nodes saved.

        Some of torch's derivative formulas take another way when they are differentiated themselves (that
        of `linalg.solve` reuses the LU factors in a plain backward, and goes back to the matrix otherwise),
        or for another part of the outputs. Eager keeps what serves all of them.
        """
        tape = self.low.tape()
        saved = (functional.unwrap(t) for node in in_order(nodes) for t in saved_with_history(node))
        found = (self.low.known(v) for value in saved for v in values_of(value))
        return {tape.source(v): None for v in found if v is not None}

    def _target(self, t: Target) -> values.Target:
        passage = isinstance(t.leaf, Passage)
        is_leaf = t.kind == "input" and t.leaf.is_leaf  # of a view, autograd would have to make its history
        slot = self.level.slot_of(t)
        return values.Target(t.kind, t.index, self.low.key(t.leaf), slot, t.name, is_leaf, passage)

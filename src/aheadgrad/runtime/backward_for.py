"""From recorded gradients to the `Backward` of a node, at any order."""

from __future__ import annotations

from functools import partial
from typing import Any

from aheadgrad.backends.eager import compile_eager
from aheadgrad.backends.registry import Backend, compile_program
from aheadgrad.conventions.wholes import backward_of_wholes
from aheadgrad.errors import InvalidProgram
from aheadgrad.partition.split import SavedSet, backward_program
from aheadgrad.recording.components import Component
from aheadgrad.recording.joint import dense_order
from aheadgrad.recording.orders import Level
from aheadgrad.runtime.anomaly import looking_for_nan
from aheadgrad.runtime.backward import Backward, Failure
from aheadgrad.runtime.by_sizes import record
from aheadgrad.runtime.by_values import attempt, looks_at_values
from aheadgrad.runtime.padded import padded
from aheadgrad.runtime.sizes import Kind, LaidOutBackward, Unusual, with_sizes
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.strides import dense_strides
from aheadgrad.torchlayer.subclasses import Form


def backward_for(level: Level, component: Component, saved: SavedSet, known: Any) -> Backward:
    """`known` is the executable for the expected tangents, if there is one."""
    backward = _backward_by(level, component, saved, known, None)
    backward.checking = _backward_by(level, component, saved, None, looking_for_nan(component.nodes))
    return backward


def _backward_by(
    level: Level, component: Component, saved: SavedSet, known: Any, backend: Backend | None
) -> Backward:
    expected = level.joint.expected_pattern(component)

    used: dict[Any, frozenset[int]] = {}

    def make(pattern: Any, state: AutocastState | None, *, by_subclasses: bool = False) -> Any:
        by = by_subclasses or (not level.session.veiled and any(isinstance(p, Form) for p in pattern))
        return _make(level, component, saved, known, pattern, state, backend, used, by_subclasses=by)

    traced = [level.joint.exits[i].traced for i in component.exits]
    if not lays_out(level):

        def make_any(pattern: Any, state: AutocastState | None) -> Any:
            tangents = [t for t, layout in zip(traced, pattern, strict=True) if layout is not None]
            shapes = [*at_hand(saved), *tangents]

            def at_once(sizes: Any = None) -> Any:
                return make(pattern, state)

            return attempt(level, shapes, len(tangents), at_once, at_once)

        backward = Backward(expected, known, make_any, level.fixed_autocast, level.session.lock)
        backward.used = used
        return backward

    def make_for(kinds: tuple[Kind, ...], state: AutocastState | None) -> Any:
        by = not level.session.veiled and any(isinstance(kind, Unusual) for kind in kinds)
        pattern = expected if by else tuple(map(_layout_for, kinds, expected, traced))
        pattern = tuple(p if kind else None for p, kind in zip(pattern, kinds, strict=True))
        tangents = [t for t, kind in zip(traced, kinds, strict=True) if kind]
        make_it = partial(make, pattern, state, by_subclasses=by)
        return record(level, [*at_hand(saved), *tangents], len(tangents), lambda sizes: make_it())

    orders = tuple(
        e if isinstance(e, Form) else dense_order(t) for e, t in zip(expected, traced, strict=True)
    )
    plainly = not level.session.veiled
    return LaidOutBackward(orders, known, make_for, level.fixed_autocast, level.session.lock, plainly=plainly)


def _layout_for(kind: Kind, expected: Any, traced: Any) -> Any:
    """What a backward is recorded for, where the trace knows of subclasses."""
    if not isinstance(kind, Unusual):
        return expected
    size = tuple(traced.size())
    if kind.form is None:
        return dense_strides(size, kind.order)
    return with_sizes(kind.form, size)


def lays_out(level: Level) -> bool:
    """Are tangents brought into one layout before the backward?"""
    return level.has_symbols or level.one_node


def at_hand(saved: SavedSet) -> list[Any]:
    """The traced values of what a node keeps, as programs get it."""
    return [*(number for _, number in saved.sizes), *(one.value for one in saved.tensors)]


def _make(
    level: Level,
    component: Component,
    saved: SavedSet,
    known: Any,
    pattern: Any,
    state: AutocastState | None,
    backend: Backend | None,
    used: dict[Any, frozenset[int]],
    *,
    by_subclasses: bool,
) -> Any:
    """A backward for a pattern of tangents that was not seen before; `used`: what it uses of the saved."""
    state = level.backward_autocast if level.fixed_autocast else state
    if by_subclasses:  # recorded for plain tangents; what its ops mean is up to those given
        pattern = tuple(p.stride if isinstance(p, Form) else p for p in pattern)
    try:
        gradients = level.record(component, pattern, state)
    except Exception as error:
        if looks_at_values(error):
            raise
        return Failure(error)
    options = level.options
    try:
        program = backward_program(level, gradients, saved)
        if by_subclasses:
            return compile_eager(program)
        if not lays_out(level):
            tensors = program.placeholders[len(saved.sizes) :][: len(saved.tensors)]
            used[pattern] = frozenset(k for k, node in enumerate(tensors) if node.users)
        run = compile_program(backend or options.backend, program)
        return backward_of_wholes(gradients, run, len(saved.tensors) + len(saved.sizes))
    except InvalidProgram:
        if known is None or options.partition == "default" or level.has_symbols:
            raise
        outputs = [level.exits[i].value for i in component.exits]
        return padded(known, outputs, level.joint.expected_pattern(component), pattern)

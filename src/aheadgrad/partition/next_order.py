"""What a differentiable backward keeps for the next order, and its program.

    (saved, tangents) -> (gradients, newly saved)

The next backward is given what this one was given (as far as it needs it) and what this one
computed. It goes back to values of the forward only through what the forward kept for this
backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aheadgrad.errors import HigherOrderError
from aheadgrad.partition.default import walk_backward
from aheadgrad.partition.split import SavedSet, SavedValue, tangent_name
from aheadgrad.program.check import check
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Saved, SavedSize, Slot, Tangent
from aheadgrad.recording.components import Component
from aheadgrad.recording.histories import at_hand, kept_by_eager
from aheadgrad.recording.joint import Gradients
from aheadgrad.recording.orders import Derivative
from aheadgrad.recording.ports import Port
from aheadgrad.torchlayer.dispatch import is_random, is_view_op
from aheadgrad.torchlayer.symbols import expression


@dataclass(frozen=True, eq=False)
class HigherSplit:
    """A differentiable backward's program, and what each of the next backwards is given.

    `kept` has, for each component, positions among all values that can be kept: what this backward was
    given (saved tensors, then tangents), then the results that only the next one needs. `saved` has
    the same values with names and reasons.
    """

    program: Program
    kept: tuple[tuple[int, ...], ...]
    saved: tuple[SavedSet, ...]


def split_higher(derivative: Derivative, given: SavedSet) -> HigherSplit:
    derivative.cutter.name_records()
    with derivative.cutter.merging_views({id(s.value) for s in given.tensors}):
        return _split(derivative, given)


def _split(derivative: Derivative, given: SavedSet) -> HigherSplit:
    cutter = derivative.cutter
    recorded = derivative.recorded
    tangents = [t for t in recorded.tangents if t is not None]
    pool = list(given.tensors)
    below = derivative.below
    names = [tangent_name(below, k) for k, t in enumerate(recorded.tangents) if t is not None]
    pool += [SavedValue(t, name, "a tangent") for t, name in zip(tangents, names, strict=True)]
    boundary = {id(s.value): k for k, s in enumerate(pool)}
    values = [e.value for e in derivative.exits]
    symbols = {expression(number) for _, number in given.sizes}
    here, _ = cutter.needed(values, set(boundary), {recorded.phase}, symbols)
    here = {i for i in here if not is_view_op(cutter.trace.records[i].target)}
    kept: list[tuple[int, ...]] = []
    saved: list[SavedSet] = []
    for component, g in zip(derivative.joint.components, derivative.gradients, strict=True):
        positions = set(range(len(given.tensors) + len(tangents))) if g is None else set()  # who knows
        used = [] if g is None else _used(derivative, g, here, set(boundary), symbols)
        used += _also_kept(derivative, component, [value for value, _ in used], here, set(boundary))
        for value, user in used:
            if id(value) not in boundary:
                boundary[id(value)] = len(pool)
                pool.append(SavedValue(value, cutter.value_name(value) or "value", f"used by {user}"))
            positions.add(boundary[id(value)])
        kept.append(tuple(sorted(positions)))
        saved.append(SavedSet(tuple(pool[k] for k in kept[-1]), given.sizes))
    new = pool[len(given.tensors) + len(tangents) :]
    return HigherSplit(_program(derivative, given, new), tuple(kept), tuple(saved))


def _also_kept(
    derivative: Derivative, component: Component, used: list[Tensor], here: set[int], boundary: set[int]
) -> list[tuple[Tensor, str]]:
    """What eager keeps beside that, as far as it is at hand."""
    trace = derivative.cutter.trace
    found = []
    for value in kept_by_eager(trace, component.nodes, used, derivative.cutter.source):
        whole = at_hand(trace, value, boundary, here)
        if whole is not None:
            found.append((whole, "derivatives of higher order"))
    return found


def _used(
    derivative: Derivative, g: Gradients, here: set[int], boundary: set[int], given: set[Any]
) -> list[tuple[Tensor, str]]:
    """The values that a next backward takes from this one, each with a reason."""
    users: dict[int, str] = {}
    values: dict[int, Tensor] = {}
    tangents = {id(t) for t in g.tangents if t is not None}
    cutter = derivative.cutter
    crossed = walk_backward(cutter, g, here, tangents, users, values, boundary, given)
    for i in crossed:
        record = cutter.trace.records[i]
        if record.phase == "forward" and record.keep:
            why = "draws random numbers" if is_random(record.target) else "must not run twice"
            raise _not_kept(f"the result of {record.target}, which {why}")
    for key, value in values.items():
        if key not in boundary and cutter.trace.producer(value) is None:
            raise _not_kept("an input")
    return [(values[key], user) for key, user in users.items()]


def _not_kept(what: str) -> HigherOrderError:
    return HigherOrderError(
        f"This derivative needs {what}, and the forward did not keep it for the first backward. Use "
        'partition="default", or differentiate the uncompiled function here.'
    )


def _program(derivative: Derivative, given: SavedSet, new: list[SavedValue]) -> Program:
    recorded = derivative.recorded
    ports = [Port(SavedSize(name), number, name) for name, number in given.sizes]
    ports += [Port(Saved(s.name, s.reason), s.value, s.name) for s in given.tensors]
    exits = derivative.below.joint.exits
    for number, (i, value) in enumerate(zip(recorded.component.exits, recorded.tangents, strict=True)):
        if value is not None:
            ports.append(Port(Tangent(exits[i].slot), value, tangent_name(derivative.below, number)))
    outputs: list[tuple[Slot, object]] = [(e.slot, e.value) for e in derivative.exits]
    outputs += [(Saved(s.name, s.reason), s.value) for s in new]
    try:
        return check(derivative.cutter.cut("backward", ports, outputs, {recorded.phase}))
    except AssertionError as error:
        raise _not_kept("a value of the forward") from error

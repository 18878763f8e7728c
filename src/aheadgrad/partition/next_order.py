"""What a differentiable backward keeps for the next order, and its program.

    (saved, tangents) -> (gradients, newly saved)

The next backward is given what this one was given (as far as it needs it) and what this one
computed. It goes back to values of the forward only through what the forward kept for this
backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aheadgrad.errors import HigherOrderError
from aheadgrad.joint.level import Gradients, NextOrder
from aheadgrad.partition.choose import Used, at_hand, kept_by_eager, reason_of, walk_backward
from aheadgrad.partition.plan import demands_of, plan
from aheadgrad.partition.saved import SavedSet, SavedValue
from aheadgrad.partition.split import tangent_ports
from aheadgrad.partition.table import Table
from aheadgrad.program.check import check
from aheadgrad.program.cut import Cutter
from aheadgrad.program.program import Program
from aheadgrad.program.shorter import shortened
from aheadgrad.program.slots import opened
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.dispatch import is_random, is_view_op
from aheadgrad.torchlayer.symbols import Number


@dataclass(frozen=True, eq=False)
class HigherSplit:
    """A differentiable backward's program, and what each of the next backwards is given.

    `kept` has, for each component, positions among all values that can be kept: what this backward was
    given (saved tensors, then tangents or their parts), then the results that only the next one needs.
    `saved` has the same values with names and reasons.
    """

    program: Program
    kept: tuple[tuple[int, ...], ...]
    saved: tuple[SavedSet, ...]


def split_next(level: NextOrder, given: SavedSet, seen: Collection[Value]) -> HigherSplit:
    """`seen` are values of lower orders that others see, too."""
    cutter = level.cutter(same=level.same(given={s.value for s in given.tensors}))
    recorded, tape = level.recorded, level.tape
    tangents = tangent_ports(level.order - 1, (level.below[i] for i in recorded.component.exits), recorded)
    pool = [*given.tensors, *(SavedValue(p.value, p.name, "a tangent") for p in tangents)]
    boundary = {s.value: k for k, s in enumerate(pool)}
    leaving = opened((e.slot, e.value) for e in level.leaving)
    symbols = {number.expr for _, number in given.sizes if type(number) is Number}
    run, _ = cutter.needed([v for _, v in leaving], set(boundary), {recorded.phase}, symbols)
    here = {i for i in run if not is_view_op(tape.ops[i].target)}
    demands = demands_of(level.options)
    start = len(pool)
    kept: list[tuple[int, ...]] = []
    saved: list[SavedSet] = []
    for component, g in zip(level.components, level.gradients, strict=True):
        positions = set(range(start)) if g is None else set()  # who knows
        reasons: Mapping[Value, str] = {}
        if g is None:
            used: Used = {}
        elif demands.cuts:
            there = frozenset(s.value for s in pool[:start])
            watched = {*seen, *level.seen, *(p.value for p in tangents)}
            table = Table(cutter, g, run, seen=watched, results=watched, given=there)
            reasons = plan(table, replace(demands, less=False, budget=None))
            used = _used(cutter, g, (), {*there, *reasons}, symbols, given.states, higher=True)
        else:
            used = _used(cutter, g, here, set(boundary), symbols, given.states)
            for value in kept_by_eager(tape, component, used):
                whole = at_hand(tape, value, boundary, here)
                if whole is not None:
                    used.setdefault(whole, "derivatives of higher order")
        for value, user in used.items():
            if value not in boundary:
                boundary[value] = len(pool)
                why = reason_of(user, reasons.get(value))
                pool.append(SavedValue(value, tape.name_of(value) or "value", why))
            positions.add(boundary[value])
        kept.append(tuple(sorted(positions)))
        saved.append(SavedSet(tuple(pool[k] for k in kept[-1]), given.sizes))
    outputs = [*leaving, *SavedSet(tuple(pool[start:])).outputs]
    try:
        ports, late = given.ports + tangents, level.computes_again
        program = shortened(check(cutter.cut("backward", ports, outputs, {recorded.phase}, late=late)))
    except AssertionError as error:
        raise _not_kept("a value of the forward") from error
    return HigherSplit(program, tuple(kept), tuple(saved))


def _used(
    cutter: Cutter,
    g: Gradients,
    here: Collection[int],
    boundary: set[Value],
    given: set[Any],
    states: Mapping[int, Value],
    *,
    higher: bool = False,
) -> Used:
    """The values that a next backward takes from this one, each with a reason."""
    used, crossed = walk_backward(cutter, g, here, given, boundary, higher=higher, states=states)
    for i in crossed:
        op = cutter.tape.ops[i]
        if op.phase == "forward" and op.keep and i not in states:
            why = "draws random numbers" if is_random(op.target) else "must not run twice"
            raise _not_kept(f"the result of {op.target}, which {why}")
    if any(value not in boundary and value.op is None for value in used):
        raise _not_kept("an input")
    return used


def _not_kept(what: str) -> HigherOrderError:
    return HigherOrderError(
        f"This derivative needs {what}, and the forward did not keep it for the first backward. Use "
        'partition="default", or differentiate the uncompiled function here.'
    )

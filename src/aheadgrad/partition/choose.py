"""What the forward saves for one backward, and why.

The default: exactly what the backward uses of the forward, so that nothing is computed twice. Otherwise as
little as rules allow, or as a budget does (`min_cut`, `budget`), and the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from aheadgrad.errors import InvalidProgram
from aheadgrad.joint.level import Component, Gradients
from aheadgrad.options import Policy
from aheadgrad.partition.plan import DEFAULT, Demands, plan
from aheadgrad.partition.saved import SavedSet, SavedValue
from aheadgrad.partition.table import Table
from aheadgrad.program.cut import Cutter
from aheadgrad.program.random import state_before
from aheadgrad.program.tape import Tape
from aheadgrad.program.values import Port, Value, free_symbols, numbers_in
from aheadgrad.torchlayer.costs import Kind
from aheadgrad.torchlayer.dispatch import is_random, is_view_op
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import Number

NO_STATES: Mapping[int, Value] = {}
_aten = torch.ops.aten
_TRANSPOSING = (_aten.t.default, _aten.transpose.int, _aten.permute.default)

Used = dict[Value, str]
"""Values that a backward takes, each with what uses it there."""


def make_table(
    cutter: Cutter,
    inputs: Sequence[Port],
    leaving: Iterable[Any],
    gradients: Gradients,
    changed: Iterable[Value],
    *,
    moves: bool,
    once: bool = False,
    seen: Collection[Value] = (),
    results: Collection[Value] = (),
    policies: tuple[Policy, ...] = (),
) -> Table:
    """What there is to choose from. `changed` are inputs that the call overwrites, `seen` inputs and outputs
    that eager does not save, `results` what others see of what is computed.

    `moves`: ops whose results only the backward uses move there, as in torch's default partition; otherwise
    they run where eager runs them.
    """
    given = {p.value for p in inputs if type(p.value) is Value}
    here, fixed = _in_forward(cutter, leaving, given, set(changed), moves=moves)
    return Table(cutter, gradients, here, fixed, once, seen, results, policies)


def choose(
    table: Table, inputs: Sequence[Port], demands: Demands = DEFAULT, stay: Collection[Value] = ()
) -> SavedSet:
    """What the forward keeps for one backward. `stay`: inputs to keep instead of views of them."""
    cutter, gradients, here = table.cutter, table.gradients, table.ahead
    tape = cutter.tape
    given = {p.value for p in inputs if type(p.value) is Value}
    as_numbers = {s for s, by in tape.makers.items() if any(tape.ops[i].phase == "forward" for i in by)}
    reasons: Mapping[Value, str] = {}
    runs: set[int] = set()
    if demands is not DEFAULT:
        reasons = plan(table, demands)
        used, runs = walk_backward(cutter, gradients, (), as_numbers, reasons, higher=True)
    elif tape.has_regions:
        kept = set(here) - table.again
        used, runs = walk_backward(cutter, gradients, kept, as_numbers, table.outside, higher=True)
    else:
        used, _ = walk_backward(cutter, gradients, here, as_numbers)
        for value in kept_by_eager(tape, gradients.component, used):
            whole = at_hand(tape, value, given, here)
            if whole is not None:
                used.setdefault(whole, "derivatives of higher order")
        used = {_untransposed(tape, v, stay): user for v, user in used.items()}
    _check(table, runs)
    place: dict[Any, int] = {}
    for i, port in enumerate(inputs):
        place.setdefault(port.value if type(port.value) is Value else None, i)
    saved = [
        SavedValue(v, tape.name_of(v) or inputs[place[v]].name, reason_of(user, reasons.get(v)))
        for v, user in used.items()
    ]
    ops = [
        op for i, op in enumerate(tape.ops) if i in runs and op.phase == "forward" and is_random(op.target)
    ]
    states = [state_before(op, -1 - k) for k, op in enumerate(ops)]
    saved += [
        SavedValue(v, v.name, "so that the same numbers are drawn again", is_state=True) for v in states
    ]
    saved.sort(key=lambda s: (-1, place[s.value]) if s.value.op is None else (s.value.op, s.value.part or 0))
    return SavedSet(tuple(saved), _sizes(cutter, inputs, gradients, saved))


def _check(table: Table, runs: set[int]) -> None:
    """No op runs again that must not. (That all else can be had from what is saved, `walk_backward` has seen:
    it went from the gradients, and from what eager keeps for higher orders, to saved values and inputs.)"""
    for i in runs:
        if table.kinds[i] is Kind.NEVER and i in table.ahead:
            raise InvalidProgram(
                f"{table.ops[i].name} would run twice, which {table.ops[i].target} must not."
            )


def _untransposed(tape: Tape, value: Value, inputs: Collection[Value]) -> Value:
    """An input in place of its transposed self, which backwards mostly transpose back; and the input has a
    history to lead to."""
    found = value
    while (op := tape.of(found)) is not None and op.target in _TRANSPOSING and op.viewed is not None:
        found = op.viewed
    return found if found in inputs else value


def reason_of(user: str, why: str | None) -> str:
    """Why a value is kept: for whom, and why that does not compute it."""
    return f"used by {user}" + (f"; {why}" if why else "")


def _in_forward(
    cutter: Cutter, leaving: Iterable[Any], given: set[Value], changed: set[Value], *, moves: bool
) -> tuple[set[int], set[int]]:
    """The ops that run in the forward, and those among them that cannot run later."""
    fixed: set[int] = set()
    found, _ = cutter.needed(leaving, given, {"forward", "write"})
    for i, op in enumerate(cutter.tape.ops):
        if op.phase != "forward":
            continue
        if changed and any(v in changed for v in op.uses):  # read before it is overwritten: then or never
            fixed.add(i)
            changed.update(op.values)
        if not moves and not is_view_op(op.target):
            found.add(i)
    return found | fixed, fixed


def walk_backward(
    cutter: Cutter,
    gradients: Gradients,
    here: Collection[int],
    given: Collection[Any],
    boundary: Collection[Value] = (),
    *,
    higher: bool = False,
    states: Mapping[int, Value] = NO_STATES,
) -> tuple[Used, set[int]]:
    """Walks from gradients to the values that they rest on: made `here` (by these ops), or in the boundary.

    Returns these values, and the ops that the backward runs. `given` are the symbols that come as numbers;
    any other has to come from the tensor whose size it is. `higher`: derivatives of higher order can be had.
    `states` go with the random ops that run again.
    """
    tape = cutter.tape
    tangents = {v for t in gradients.tangents if t is not None for v in values_of(t)}
    used: Used = {}
    runs: set[int] = set()
    sized: set[Any] = set()
    stack: list[tuple[Value, str]] = [
        (v, "a gradient") for g in gradients.grads for v in values_of(g) if v is not None
    ]
    if higher:
        stack = [(v, "derivatives of higher order") for v in gradients.component.keeps] + stack
    for i, op in enumerate(tape.ops):
        if op.keep and op.phase == gradients.phase:
            runs.add(i)
            stack.extend((v, op.name) for v in op.uses)
    while stack:
        value, user = stack.pop()
        if type(value) is not Value:
            continue
        value = cutter.source(value)
        if value in tangents:
            continue
        if value.op is None or value.op in here or value in boundary:
            used.setdefault(value, user)
        elif value.op not in runs:
            runs.add(value.op)
            op = tape.ops[value.op]
            stack.extend((v, op.name) for v in op.uses)
            if value.op in states:
                used.setdefault(states[value.op], op.name)
            for symbol in cutter.made_numbers((op.args, op.kwargs)) - sized:
                sized.add(symbol)
                if symbol not in given:
                    by = next((i for i in tape.makers[symbol] if i in here), None)
                    by = tape.maker(symbol, {gradients.phase}) if by is None else by
                    stack.extend((v, op.name) for v in _showing(tape.ops[by].values, symbol))
    return used, runs


def kept_by_eager(tape: Tape, component: Component, used: Iterable[Value]) -> list[Value]:
    """What eager keeps for derivatives of higher order and a backward does not use anyway."""
    known = set(used)
    return [v for v in component.keeps if not any(w in known for w in tape.views_back(v))]


def at_hand(tape: Tape, value: Value, given: Collection[Value], here: Collection[int]) -> Value | None:
    """The value, or what it is a view of, if given or made by one of these ops."""
    return next(
        (v for v in tape.views_back(value) if v in given or (v.op is not None and v.op in here)), None
    )


def _showing(values: Iterator[Value], symbol: Any) -> list[Value]:
    """The first of these tensors whose size a symbol is."""
    return [v for v in values if any(n.expr == symbol for *_, n in v.type.shown())][:1]


def _sizes(
    cutter: Cutter, inputs: Sequence[Port], gradients: Gradients, saved: list[SavedValue]
) -> tuple[tuple[str, Any], ...]:
    """Each symbol that the backward needs is saved as a number."""
    tape = cutter.tape
    if not tape.sized:
        return ()
    tangents = [v for t in gradients.tangents if t is not None for v in values_of(t)]
    given = [s.value for s in saved] + tangents
    needed = free_symbols(given)
    grads = [v for g in gradients.grads for v in values_of(g)]
    for i in cutter.needed(grads, set(given), {gradients.phase})[0]:
        needed |= free_symbols(numbers_in((tape.ops[i].args, tape.ops[i].kwargs)))
    if not needed:
        return ()
    known = providers(tape, inputs)
    return tuple(known[s] for s in sorted(needed, key=str) if s in known)


def providers(tape: Tape, inputs: Sequence[Port]) -> dict[Any, tuple[str, Any]]:
    """Which number of the inputs is which symbol, and what it is called: numbers given come first."""
    found: dict[Any, tuple[str, Any]] = {}
    for port in inputs:
        if type(port.value) is Number:
            found.setdefault(port.value.expr, (port.name, port.value))
    for port in inputs:
        for op, _, number in port.value.type.shown() if type(port.value) is Value else ():
            if number.expr not in found:
                found[number.expr] = (tape.naming.of_size(number.expr, op), number)
    for expr in tape.makers:
        made = tape.ops[tape.maker(expr, None)]
        if made.phase != "forward":
            continue
        if type(made.out) is Number:
            found.setdefault(expr, (made.name, made.out))
        elif expr not in found:
            for op, _, number in (shown for v in made.values for shown in v.type.shown()):
                if number.expr == expr:
                    found[expr] = (tape.naming.of_size(expr, op), number)
                    break
    return found

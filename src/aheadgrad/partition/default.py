"""The default partition: save exactly what the backward uses of the forward.

The forward computes what the outputs need; whatever of that the backward uses is saved, and
nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor

from aheadgrad.partition.split import SavedSet, SavedValue, needed_symbols
from aheadgrad.program.slots import Slot
from aheadgrad.recording.cut import Cutter
from aheadgrad.recording.exits import Exit
from aheadgrad.recording.histories import at_hand, kept_by_eager
from aheadgrad.recording.joint import Gradients
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import expression, is_symbolic, places


def choose(
    cutter: Cutter,
    inputs: list[tuple[Slot, Any]],
    exits: list[Exit],
    gradients: list[Gradients],
    changed: frozenset[int] = frozenset(),
    *,
    torch_like: bool = False,
    any_order: bool = False,
) -> SavedSet:
    """`changed`: ids of the values of inputs that the call itself overwrites.

    `torch_like`: ops of the forward whose results only the backward uses move there, as in
    torch's default partition; otherwise they run where eager runs them. `any_order`: keep also what
    eager keeps for formulas that take another way when they are differentiated.
    """
    cutter.name_records()
    forward_inputs = {id(v) for _, v in inputs if isinstance(v, Tensor)}
    leaving = [v for e in exits for v in values_of(e.value)]
    in_forward, _ = cutter.needed(leaving, forward_inputs, {"forward"})
    if changed:
        in_forward |= _resting_on(cutter, changed)
    if not torch_like:
        in_forward |= {
            i
            for i, record in enumerate(cutter.trace.records)
            if record.phase == "forward" and not is_view_op(record.target)
        }
    tangents = {id(v) for g in gradients for t in g.tangents if t is not None for v in values_of(t)}
    users: dict[int, str] = {}
    values: dict[int, Tensor] = {}
    records = cutter.trace.records
    as_numbers = {
        s for s, by in cutter.trace.numbers.items() if any(records[i].phase == "forward" for i in by)
    }
    for g in gradients:
        walk_backward(cutter, g, in_forward, tangents, users, values, given=as_numbers)
    if any_order:
        nodes = [node for g in gradients if g.component.targets for node in g.component.nodes]
        for value in kept_by_eager(cutter.trace, nodes, values.values(), cutter.source):
            whole = at_hand(cutter.trace, value, forward_inputs, in_forward)
            if whole is not None:
                users.setdefault(id(whole), "derivatives of higher order")
                values[id(whole)] = whole
    saved = [
        SavedValue(values[key], _name(cutter, inputs, values[key]), f"used by {user}")
        for key, user in users.items()
    ]
    saved.sort(key=lambda s: _position(cutter, inputs, s.value))
    return SavedSet(tuple(saved), saved_sizes(cutter, inputs, gradients, saved))


def walk_backward(
    cutter: Cutter,
    gradients: Gradients,
    in_forward: set[int],
    tangents: set[int],
    users: dict[int, str],
    values: dict[int, Tensor],
    boundary: set[int] = frozenset(),  # type: ignore[assignment]
    given: Container[Any] = (),
) -> set[int]:
    """Walks from the gradients to the values of the forward (or in the boundary) that they rest on.

    Fills `users` and `values`; returns the records that the backward runs. `given` are the symbols that
    come as numbers; any other has to come from the tensor whose size it is.
    """
    trace = cutter.trace
    seen: set[int] = set()
    sized: set[Any] = set()
    stack: list[tuple[Tensor, str]] = [
        (v, "a gradient") for g in gradients.grads if g is not None for v in values_of(g)
    ]
    for i, record in enumerate(trace.records):
        if record.keep and record.phase == gradients.phase:
            seen.add(i)
            stack.extend((t, record.name) for t in record.tensors())
    while stack:
        value, user = stack.pop()
        value = cutter.source(value)
        if id(value) in tangents:
            continue
        made = trace.producer(value)
        if made is None and id(value) in trace.constants:
            continue
        if made is None or made.record in in_forward or id(value) in boundary:
            users.setdefault(id(value), user)
            values[id(value)] = value
        elif made.record not in seen:
            seen.add(made.record)
            record = trace.records[made.record]
            stack.extend((t, record.name) for t in record.tensors())
            for symbol in cutter.made_numbers((record.args, record.kwargs)) - sized:
                sized.add(symbol)
                if symbol not in given:
                    by = next((i for i in trace.numbers[symbol] if i in in_forward), None)
                    by = trace.maker(symbol, {gradients.phase}) if by is None else by
                    stack.extend((t, record.name) for t in _showing(trace.records[by].out, symbol))
    return seen


def _showing(out: Any, symbol: Any) -> list[Tensor]:
    """The result of which the symbol is a size."""
    parts = out if isinstance(out, list | tuple) else (out,)
    shows = [
        p for p in parts if isinstance(p, Tensor) and any(expression(n) == symbol for *_, n in places(p))
    ]
    return shows[:1]


def _resting_on(cutter: Cutter, changed: frozenset[int]) -> set[int]:
    """Ops of the forward that read an input before it is overwritten: too late in the backward."""
    found: set[int] = set()
    tainted = set(changed)
    for i, record in enumerate(cutter.trace.records):
        if record.phase == "forward" and any(id(t) in tainted for t in record.tensors()):
            found.add(i)
            parts = record.out if isinstance(record.out, list | tuple) else (record.out,)
            tainted |= {id(p) for p in parts if isinstance(p, Tensor)}
    return found


def _name(cutter: Cutter, inputs: list[tuple[Slot, Any]], value: Tensor) -> str:
    name = cutter.value_name(value)
    if name is not None:
        return name
    return next(f"primals_{i + 1}" for i, (_, v) in enumerate(inputs) if v is value)


def _position(cutter: Cutter, inputs: list[tuple[Slot, Any]], value: Tensor) -> tuple[int, int, int]:
    made = cutter.trace.producer(value)
    if made is None:
        return (0, next(i for i, (_, v) in enumerate(inputs) if v is value), 0)
    return (1, made.record, made.part or 0)


def saved_sizes(
    cutter: Cutter, inputs: list[tuple[Slot, Any]], gradients: list[Gradients], saved: list[SavedValue]
) -> tuple[tuple[str, Any], ...]:
    """Each symbol that the backward needs is saved as a number."""
    if not cutter.sized:
        return ()
    numbers: dict[Any, tuple[str, Any]] = {}
    found: list[tuple[str, Any]] = []
    for symbol in needed_symbols(cutter, gradients, saved):
        if not numbers:
            numbers = providers(cutter, inputs)
        if symbol in numbers:
            found.append(numbers[symbol])
    return tuple(found)


def providers(cutter: Cutter, inputs: list[tuple[Slot, Any]]) -> dict[Any, tuple[str, Any]]:
    """Which number of the inputs is which symbol, and what it is called: numbers given come first."""
    found: dict[Any, tuple[str, Any]] = {}
    for i, (_, value) in enumerate(inputs):
        if is_symbolic(value):
            found.setdefault(expression(value), (f"primals_{i + 1}", value))
    for _, value in inputs:
        if isinstance(value, Tensor):
            for op, _, number in places(value):
                expr = expression(number)
                if expr not in found:
                    found[expr] = (cutter.symbol_name(expr, op), number)
    for expr in cutter.trace.numbers:
        record = cutter.trace.records[cutter.trace.maker(expr, None)]
        if record.phase != "forward":
            continue
        if is_symbolic(record.out):
            found.setdefault(expr, (record.name, record.out))
        elif expr not in found:
            for op, _, number in _places_in(record.out):
                if expression(number) == expr:
                    found[expr] = (cutter.symbol_name(expr, op), number)
                    break
    return found


def _places_in(out: Any) -> list[Any]:
    parts = out if isinstance(out, list | tuple) else (out,)
    return [place for part in parts if isinstance(part, Tensor) for place in places(part)]

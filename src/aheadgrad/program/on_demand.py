"""The order of a backward that runs ops of the forward again: each right before it is first needed.

Run at the start, where the tape has them, their results would lie in memory until their turn comes. What
frees nothing waits in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aheadgrad.program.tape import Tape
from aheadgrad.program.values import Value


def on_demand(
    tape: Tape, wanted: set[int], arriving: Iterable[Value], source: Callable[[Value], Value]
) -> list[int]:
    """The wanted ops; those that rest on what arrives (tangents) keep their order."""
    later = set(arriving)
    order: list[int] = []
    placed: set[int] = set()
    for i in sorted(wanted):
        op = tape.ops[i]
        if not (op.keep or any(source(v) in later for v in op.uses)):
            continue
        later.update(op.values)
        _place(tape, i, wanted, source, placed, order)
    for i in sorted(wanted - placed):  # what results alone need
        _place(tape, i, wanted, source, placed, order)
    return _put_off(tape, order, source)


def _place(
    tape: Tape,
    last: int,
    wanted: set[int],
    source: Callable[[Value], Value],
    placed: set[int],
    order: list[int],
) -> None:
    """An op, after all that it needs and that is not there yet."""
    stack = [last]
    while stack:
        i = stack[-1]
        needs = {source(v).op for v in tape.ops[i].uses}
        missing = [n for n in needs if n is not None and n in wanted and n not in placed and n != i]
        if i in placed or not missing:
            stack.pop()
            if i not in placed:
                placed.add(i)
                order.append(i)
        else:
            stack.extend(sorted(missing))


def _put_off(tape: Tape, order: list[int], source: Callable[[Value], Value]) -> list[int]:
    """An op that frees nothing waits until an op would free what it takes, or needs what it makes.

    So less is in memory meanwhile, and never more. Nothing waits past an op with an effect.
    """
    end = len(order)
    roots: dict[Value, Value] = {}
    dies: dict[Value, int] = {}
    used: set[Value] = set()
    for at, i in enumerate(order):
        op = tape.ops[i]
        taken = [source(v) for v in op.uses]
        used.update(taken)
        dies.update((roots.get(v, v), at) for v in taken)
        for v in op.values:
            roots[v] = v if op.viewed is None else roots.get(taken[0], taken[0])
    dies.update((root, end) for v, root in roots.items() if v not in used)  # a result
    places = list(range(end))
    needed: dict[Value, int] = {}
    barrier = end
    for at in reversed(range(end)):
        op = tape.ops[order[at]]
        taken = [source(v) for v in op.uses]
        if op.keep or not all(type(v) is Value for v in op.outs):
            barrier = at
        else:
            frees = [dies[roots.get(v, v)] for v in taken]
            if op.viewed is not None:  # nothing; a result stays, as what it views may come to be made there
                frees = [needed.get(v, at) for v in op.values]
            waits = min(frees, default=end)
            if waits > at:
                places[at] = min(waits, barrier, *(needed.get(v, end) for v in op.values))
        needed.update((v, min(places[at], needed.get(v, end))) for v in taken)
    waiting = [(places[at], places[at] == at, at) for at in range(end)]
    return [order[at] for _, _, at in sorted(waiting)]

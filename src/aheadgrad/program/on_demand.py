"""The order of a backward that runs ops of the forward again: each right before it is first needed.

Run at the start, where the tape has them, their results would lie in memory until their turn comes.
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
    return order


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

"""Large results last: an op whose result only leaves runs when the others are done.

    grad_w = mm(t(a), g)        # 40 x 40, of tensors of 10 x 40
    grad_a = mm(g, w)           # the rest of the backward needs this one
    ...

Eager computes both at once and holds the first while all the rest runs. Nothing depends on when it is
computed; what it is computed from takes less memory meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable, is_random, is_view_op


def sunk(program: Program) -> Program:
    """The same program with such ops at its end. One that changes its arguments is left as it is."""
    ops = program.ops
    if any(type(op.target) is not OpOverload or is_mutable(op.target) for op in ops):
        return program
    users: dict[Value, list[Op]] = {}
    for op in ops:
        for v in op.uses:
            users.setdefault(v, []).append(op)
    results = {v for v in program.results if type(v) is Value}
    late: set[Op] = set()
    for op in reversed(ops):
        values = list(op.values)
        only_leave = values and all(v in results or v in users for v in values)
        if not only_leave or any(u not in late for v in values for u in users.get(v, ())):
            continue
        pure = not op.keep and not is_random(op.target)
        if is_view_op(op.target) or (pure and _is_larger(op, users, results, late)):
            late.add(op)
    if all(is_view_op(op.target) for op in late):
        return program
    return replace(program, ops=(*(op for op in ops if op not in late), *(op for op in ops if op in late)))


def _is_larger(op: Op, users: dict[Value, list[Op]], held: set[Value], late: set[Op]) -> bool:
    """Is what it makes larger than what would have to be kept for it until the end?"""
    kept = [v for v in dict.fromkeys(op.uses) if v not in held and late.isdisjoint(users[v])]
    return bool(sum(v.type.bytes for v in op.values) > sum(v.type.bytes for v in kept))

"""Which ops of a program need not pass autograd, which has nothing to do for them without grad mode.

What autograd does all the same is to note which tensors are views of which, so that writes to one show in
the other's version. That matters where somebody else sees both: results that share memory are taken
afterwards, and views of what was given before.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from aheadgrad.program.program import Program
from aheadgrad.program.slots import Between, Gradient, Saved, Slot
from aheadgrad.program.values import Op, Value, numbers_in
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable, is_view_op

_SEVERAL = 4


def ops_below(program: Program) -> tuple[set[Op], set[Op]]:
    """The ops that can run below autograd, and those that come before them; others come afterwards."""
    ops = program.ops
    if len(ops) < _SEVERAL or not all(_is_plain(op.target) for op in ops):
        return set(), set()
    makers = {v: op for op in ops for v in op.values}
    outputs = [(slot, _behind(makers, v)) for slot, v in program.outputs if type(v) is Value]
    roots = Counter(root for _, (*_, root) in outputs)
    seen = {root for slot, (*_, root) in outputs if not _is_inside(slot)}
    unknown = [
        (views, root)
        for slot, (*views, root) in outputs
        if root not in makers or (roots[root] > 1 and root in seen)
    ]
    late = _late(program, {v for views, root in unknown for v in (*views, root)})
    early = {makers[v] for views, root in unknown if root not in makers for v in views} - late
    below = {op for op in ops if op not in late and op not in early}
    sized = any(True for op in early for _ in numbers_in(op.args))  # which may be read off what comes later
    if sized or any(makers[v] in below for views, _ in unknown for v in views):
        return set(), set()
    return below, early


def _is_inside(slot: Slot) -> bool:
    """Does it go to another program only?"""
    return isinstance(slot, Saved) or (isinstance(slot, Gradient) and isinstance(slot.of, Between))


def _late(program: Program, seen: set[Value]) -> set[Op]:
    """Views that only those results need that others see, too."""
    needed: set[Any] = {v for v in program.results if type(v) is Value and v not in seen}  # or by ops before
    results = {v for v in program.results if type(v) is Value and v in seen}
    late: set[Op] = set()
    for op in reversed(program.ops):
        values = set(op.values)
        if is_view_op(op.target) and needed.isdisjoint(values) and not results.isdisjoint(values):
            late.add(op)
            results.update(op.uses)
        else:
            needed.update(op.uses)
    return late


def _behind(makers: dict[Value, Op], value: Value) -> list[Value]:
    """A value, what it is a view of, what that is a view of, and so on."""
    found = [value]
    while value in makers and (viewed := makers[value].viewed) is not None:
        value = viewed
        found.append(value)
    return found


def _is_plain(target: Any) -> bool:
    """Is it one of torch's own ops, and does it compute and nothing else?"""
    return type(target) is OpOverload and target.namespace == "aten" and not is_mutable(target)

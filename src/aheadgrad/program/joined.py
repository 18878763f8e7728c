"""Two backwards of one recording as one program: the second takes what the first gives.

joined(first, second, ((2, 0),))    # result 2 of the first is input 0 of the second
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from aheadgrad.program.check import check
from aheadgrad.program.expanded_tangents import in_layouts
from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.fxnames import Names


class Joined(NamedTuple):
    """`taken` are the inputs of the second that come behind those of the first (which may have the others).
    `kept` has, for results of the first that it does not take, where they are now."""

    program: Program
    taken: tuple[int, ...]
    kept: dict[int, int]


def joined(
    first: Program,
    second: Program,
    wires: Sequence[tuple[int, int]],
    sums: Sequence[tuple[int, int]] = (),
) -> Joined | None:
    """None where the second could not run on what the first makes, or where there are effects."""
    results = first.results
    instead = {second.inputs[i].value: results[k] for k, i in wires}
    others = {v: w.type.stride for v, w in instead.items() if w.type.stride != v.type.stride}
    layouts = in_layouts(second, others) if others else {}
    if layouts is None or first.parts_first != second.parts_first:
        return None
    instead.update((v, _laid(v, strides)) for v, strides in layouts.items() if v not in instead)
    known = {p.value for p in first.inputs}
    taken = [i for i, p in enumerate(second.inputs) if p.value not in instead and p.value not in known]
    names = Names(p.name for p in first.inputs)
    more = (second.inputs[i] for i in taken)
    ports = (*first.inputs, *(replace(p, name=names.fresh(p.name)) for p in more))
    ops = _together(first, second, {p.value for p in ports}, instead)
    own = [instead.get(v, v) if type(v) is Value else v for v in second.results]
    if ops is None or not _add(ops, own, [(results[k], j) for k, j in sums]):
        return None
    used = {k for k, _ in (*wires, *sums)}
    left = [k for k, v in enumerate(results) if v is not None and k not in used]
    outputs = [(slot, v) for (slot, _), v in zip(second.outputs, own, strict=True)]
    outputs += [first.outputs[k] for k in left]
    whole = replace(second, inputs=tuple(ports), ops=tuple(ops), outputs=tuple(outputs))
    return Joined(check(whole), tuple(taken), {k: len(own) + n for n, k in enumerate(left)})


def _add(ops: list[Op], own: list[Any], sums: Sequence[tuple[Value, int]]) -> bool:
    """In the order in which the engine would add them; False where they are laid out otherwise."""
    totals: dict[int, Value] = {}
    names = Names(op.name for op in ops)
    last = [(own[j], j) for j in dict.fromkeys(j for _, j in sums) if own[j] is not None]
    for value, j in (*sums, *last):
        total = totals.get(j)
        if total is None:
            totals[j] = value
            continue
        if total.type != value.type or 0 in total.type.stride:
            return False
        name = names.fresh("add")
        made = Value(-1, total.type, name)
        ops.append(Op(torch.ops.aten.add.Tensor, (total, value), {}, made, (total, value), name))
        totals[j] = made
    for j, total in totals.items():
        own[j] = total
    return True


def _together(
    first: Program, second: Program, there: set[Value], instead: dict[Value, Value]
) -> list[Op] | None:
    """All ops but those for what is given. What both compute is computed twice, as it was before: it would
    wait in memory. None if there are effects."""

    def now(value: Any) -> Any:
        return instead.get(value, value) if type(value) is Value else value

    if any(op.keep for op in (*first.ops, *second.ops)):
        return None
    ops = [op for op in first.ops if not there.issuperset(op.values)]
    names = Names(name for op in ops for name in {op.name, *(v.name for v in op.values)})
    made = {v for op in ops for v in op.values}
    for op in second.ops:
        if there.issuperset(op.values) or (is_view_op(op.target) and made.issuperset(op.values)):
            continue
        name = names.fresh(op.name)
        for v in op.values:
            called = name if v.part is None else names.fresh(v.name)
            if called != v.name:
                instead[v] = replace(now(v), name=called)
        out = tuple(map(now, op.out)) if type(op.out) is tuple else now(op.out)
        ops.append(replace(op.mapped(now), out=out, name=name))
    return ops


def _laid(value: Value, strides: Any) -> Value:
    return replace(value, type=replace(value.type, stride=strides))

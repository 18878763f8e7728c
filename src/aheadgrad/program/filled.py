"""A tensor that is filled part by part: where formulas pad each part with zeros and add, it is put together.

    select_backward(a, [n, 2], -1, 0) + select_backward(b, [n, 2], -1, 1)    is    stack([a, b], -1) + 0

So do gradients of coordinates that a network stacks or joins. Adding zero makes 0.0 of -0.0, as the sum does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from aheadgrad.program.values import Op, Value

_aten = torch.ops.aten
_SELECT, _SLICE = _aten.select_backward.default, _aten.slice_backward.default
_JOINS = {_SELECT: _aten.stack.default, _SLICE: _aten.cat.default}
Parts = list[tuple[int, int, Value]]
"""Each with the places that it fills along the dimension: from, and to."""


def put_together(op: Op, maker: Callable[[Any], Op | None]) -> tuple[Op, Op] | None:
    """A sum as two ops that give the same, if its terms fill a tensor; `maker` tells what made a value that
    nobody else needs."""
    if op.target is not _aten.add.Tensor or op.kwargs or type(op.out) is not Value:
        return None
    looks, first = op.out.type, _first_part(op, maker)
    if first is None or not all(type(n) is int for n in looks.size) or not looks.dtype.is_floating_point:
        return None
    dim = first.args[2] % len(looks.size)
    parts = _parts(op, first, dim, maker)
    if parts is None or looks.stride != _contiguous(looks.size):
        return None
    parts.sort(key=lambda part: part[:2])
    ends = [0, *(end for _, end, _ in parts)]
    if [start for start, _, _ in parts] != ends[:-1] or ends[-1] != looks.size[dim]:
        return None
    values = [value for _, _, value in parts]
    if any(v.type.dtype is not looks.dtype for v in values):
        return None
    joined = Value(-1, looks, f"{op.name}_joined")
    join = replace(op, target=_JOINS[first.target], args=(values, dim), out=joined, uses=tuple(values))
    return replace(join, name=joined.name), replace(op, args=(joined, 0), uses=(joined,))


def _first_part(op: Op | None, maker: Callable[[Any], Op | None]) -> Op | None:
    while op is not None and op.target is _aten.add.Tensor:
        op = maker(op.args[0])
    return op if op is not None and op.target in _JOINS and type(op.out) is Value else None


def _parts(op: Op | None, like: Op, dim: int, maker: Callable[[Any], Op | None]) -> Parts | None:
    """What fills a sum; None if one of its terms is something else."""
    if op is None or op.kwargs or type(op.out) is not Value or op.out.type != like.out.type:
        return None
    if op.target is _aten.add.Tensor and len(op.args) == 2:
        terms = [_parts(maker(v), like, dim, maker) for v in op.args]
        return None if None in terms else [part for term in terms for part in term or ()]
    if op.target is not like.target or op.args[2] % len(like.out.type.size) != dim:
        return None
    return _part(op, like.out.type.size[dim])


def _part(op: Op, length: int) -> Parts | None:
    given, _, _, *place = op.args
    if not all(type(n) is int for n in place) or type(given) is not Value:
        return None
    if op.target is _SELECT:
        return [(place[0] % length, place[0] % length + 1, given)]
    start, end, step = place
    start, end, _ = slice(start, end).indices(length)
    return [(start, end, given)] if step == 1 and start < end else None


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    found, step = [], 1
    for n in reversed(size):
        found.append(step)
        step *= max(n, 1)
    return tuple(reversed(found))

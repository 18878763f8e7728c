"""The same program with fewer ops: what was computed before is not computed again.

Derivatives of derivatives repeat themselves: formulas share terms unknowingly, and views are
undone by views. Every rule here is exact to the last bit: an op with the same arguments gives the same, and a
chain of views that ends with the geometry it began with is where it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from aheadgrad.program.program import Program
from aheadgrad.program.same import key_of
from aheadgrad.program.values import Op, TensorType, Value
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable, is_random, is_view_op
from aheadgrad.torchlayer.symbols import Number

_aten = torch.ops.aten
_AS_STRIDED = _aten.as_strided.default
_REARRANGING = (_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default)
_NEAR = 24  # ops: what was computed longer ago may cost more memory than time
_LITTLE = 16  # times less than what it was computed from
_BROADCASTING = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)


def shortened(program: Program) -> Program:
    """A program without repetitions. One that changes its arguments is left as it is."""
    if any(type(op.target) is not OpOverload or is_mutable(op.target) for op in program.ops):
        return program
    work = _Shorter(program)
    for op in program.ops:
        work.add(op)
    results = [work.now(v) for v in program.results]
    ops = _alive(work.ops, results)
    outputs = tuple((slot, v) for (slot, _), v in zip(program.outputs, results, strict=True))
    return replace(program, ops=ops, outputs=outputs)


class _Shorter:
    def __init__(self, program: Program) -> None:
        self.ops: list[Op] = []
        self.results: set[Any] = {v for v in program.results if type(v) is Value}
        self.uses = Counter(v for op in program.ops for v in op.uses)
        self.uses.update(self.results)
        self.same: dict[Value, Value] = {}
        self.equal: dict[Value, Value] = {}  # to one that may be gone by then
        self.known: dict[Any, tuple[Op, int]] = {}  # with the place of its last use as such
        self.makers: dict[Value, Op] = {}

    def now(self, value: Any) -> Any:
        return self.same.get(value, value) if type(value) is Value else value

    def add(self, op: Op) -> None:
        if any(v in self.same for v in op.uses):
            op = op.mapped(self.now)
        op = self._without_views(self._simpler(op))
        if not op.keep and not is_random(op.target):
            back = self._where_it_began(op) or self._times_one(op)
            if back is not None and self._may_be([op.out], [back]):
                self.same[op.out] = back
                return
            key = op.target, key_of(op.args, self._first), key_of(op.kwargs, self._first)
            before, at = self.known.get(key, (op, 0))
            if before is not op and self._is_near(before, at) and self._may_be(op.outs, before.outs):
                self.same.update(zip(op.outs, before.outs, strict=True))
                self.known[key] = before, len(self.ops)
                return
            pairs = zip(op.outs, before.outs, strict=True)
            self.equal.update((v, self.equal.get(w, w)) for v, w in pairs if v is not w)
            self.known[key] = op, len(self.ops)
        self.makers.update((v, op) for v in op.values)
        self.ops.append(op)

    def _first(self, value: Value) -> Value:
        return self.equal.get(value, value)

    def _is_near(self, op: Op, at: int) -> bool:
        """Is it worth keeping for so long? Views take no memory, sums little; what is gone by then would."""
        if is_view_op(op.target) or len(self.ops) - at <= _NEAR:
            return True
        made, given = (sum(v.type.bytes for v in values) for values in (op.values, op.uses))
        return bool(made * _LITTLE <= given)

    def _where_it_began(self, op: Op) -> Value | None:
        """The value that a chain of views leads back to."""
        return self._led_back(op, op.out.type) if type(op.out) is Value else None

    def _led_back(self, op: Op | None, looks: TensorType) -> Value | None:
        """What a chain of views that ends with this op began with, if it looks like this."""
        step = op
        while step is not None and type(step.out) is Value and is_view_op(step.target):
            if step.target is _AS_STRIDED or type(step.args[0]) is not Value or _may_raise(step):
                return None
            value = step.args[0]
            if value.type == looks:
                return value
            step = self.makers.get(value)
        return None

    def _times_one(self, op: Op) -> Value | None:
        """The other factor, where a formula multiplies by a tensor of one 1."""
        if op.target is not _aten.mul.Tensor or op.kwargs:
            return None
        for one, other in (op.args, op.args[::-1]):
            made = self.makers.get(one) if type(one) is Value else None
            if made is None or made.target is not _aten.ones.default or one.type.size != ():
                continue
            if type(other) is Value and other.type == op.out.type:
                return other
        return None

    def _without_views(self, op: Op) -> Op:
        """`t(f(t(x), y))` is `f(x, t(y))`, where `f` takes each element by itself."""
        made = self._maker(op.args[0]) if op.target in _REARRANGING and type(op.out) is Value else None
        if made is None or _may_raise(op) or torch.Tag.pointwise not in made.target.tags:
            return op
        if made.keep or is_random(made.target) or type(made.out) is not Value or op.args[0] in self.results:
            return op
        looks, wanted = made.out.type, op.out.type
        mixes = op.target is _aten.t.default and made.target in _BROADCASTING  # the first operand decides
        mixes = mixes and all(type(n) is int and n > 1 for n in looks.size)
        turned: dict[Value, Value] = {}
        for k, v in enumerate(made.uses):
            same = v.type.stride == looks.stride
            if v.type.size != looks.size or not (same or (mixes and k)):
                return op
            stride = wanted.stride if same else v.type.stride[::-1]
            like = replace(v.type, size=wanted.size, stride=stride)
            turned[v] = self._led_back(self.makers.get(v), like) or Value(-1, like, f"{op.name}_turned_{k}")
        new = [(v, t) for v, t in turned.items() if t.number == -1]
        if len(new) == len(turned) or (op.target is _aten.view.default and new):
            return op
        for v, t in new:
            view = replace(op, args=(v, *op.args[1:]), out=t, uses=(v,), name=t.name)
            self.makers[t] = view
            self.ops.append(view)
        return replace(made.mapped(lambda v: turned.get(v, v)), out=op.out, name=op.name)

    def _may_be(self, values: Sequence[Any], others: Sequence[Any]) -> bool:
        """May one take the other's place? Results have memory of their own wherever they had before."""
        for value, other in zip(values, others, strict=True):
            if type(value) is not Value or type(other) is not Value:
                return False
            if value in self.results:
                made = self.makers.get(other)
                if made is None or is_view_op(made.target) or other in self.results:
                    return False
        self.results.update(o for v, o in zip(values, others, strict=True) if v in self.results)
        return True

    def _simpler(self, op: Op) -> Op:
        """The same result with less around it, which is left to nobody then."""
        if op.kwargs or len(op.args) != 2:
            return op
        if op.target is _aten.view.default:
            return self._summed(op)
        if op.target is _aten.expand.default:
            made = self._made_by(op.args[0], _aten.view.default)
            spreads = made is not None and _only_spreads(made)
            return replace(op, args=(made.args[0], op.args[1]), uses=made.uses) if made and spreads else op
        if op.target in _BROADCASTING:
            return self._subtracted_from_one(self._broadcast(op))
        return op

    def _maker(self, value: Any) -> Op | None:
        """The op that made a value, if nobody else needs the value."""
        return self.makers.get(value) if type(value) is Value and self.uses[value] == 1 else None

    def _made_by(self, value: Any, target: Any) -> Op | None:
        made = self._maker(value)
        return made if made is not None and made.target is target else None

    def _summed(self, op: Op) -> Op:
        """A sum without the dimensions that a view takes away."""
        summed = self._made_by(op.args[0], _aten.sum.dim_IntList)
        if summed is None or len(summed.args) != 3 or summed.kwargs or not summed.args[2]:
            return op
        given, dims, _ = summed.args
        gone = {d % len(given.type.size) for d in dims or ()} if given.type.size else set()
        if not gone or [n for d, n in enumerate(given.type.size) if d not in gone] != list(op.args[1]):
            return op
        return replace(op, target=summed.target, args=(given, dims, False), uses=(given,))

    def _broadcast(self, op: Op) -> Op:
        """Without an expansion that the op does by itself."""
        args = list(op.args)
        for k in (0, 1):
            expanded, other = self._maker(args[k]), args[1 - k]
            if (
                expanded is None
                or not _only_spreads(expanded)
                or type(other) is not Value
                or other.type.size != op.out.type.size
            ):
                continue
            if other.type.dtype == args[k].type.dtype == op.out.type.dtype:
                args[k] = expanded.args[0]
        return op if args == list(op.args) else replace(op, args=tuple(args), uses=tuple(args))

    def _subtracted_from_one(self, op: Op) -> Op:
        """`1 - x`, where a formula fills a tensor with ones first."""
        first, second = op.args
        filled = self._made_by(first, _aten.fill.Scalar) if op.target is _aten.sub.Tensor else None
        if filled is None or filled.args[1] != 1 or type(second) is not Value:
            return op
        if not second.type == first.type == op.out.type:
            return op
        return replace(op, target=_aten.rsub.Scalar, args=(second, 1), uses=(second,))


def _only_spreads(op: Op) -> bool:
    """Does it do only what ops do by themselves where their operands have other sizes?"""
    if op.target is _aten.expand.default:
        return True
    if op.target is not _aten.view.default or type(op.args[0]) is not Value:
        return False
    size, before = op.out.type.size, op.args[0].type.size
    return len(size) > len(before) and size == (*(1 for _ in size[len(before) :]), *before)


def _may_raise(op: Op) -> bool:
    """A view with a size left open (-1) raises where others are zero; sizes that are numbers were seen."""
    given = [v for arg in op.args[1:] if isinstance(arg, list | tuple) for v in arg]
    return -1 in given and any(type(n) is Number for n in op.out.type.size)


def _alive(ops: Sequence[Op], results: Sequence[Any]) -> tuple[Op, ...]:
    """The ops that somebody needs."""
    used: set[Any] = {v for v in results if type(v) is Value}
    found = []
    for op in reversed(ops):
        values = list(op.values)
        if op.keep or len(values) < len(op.outs) or not used.isdisjoint(values):
            found.append(op)
            used.update(op.uses)
    return tuple(reversed(found))

"""Values that are the same: views taken again, ops that run again with the same arguments.

    same_values(tape, given)                        # views only: functionalization takes them again at will
    same_values(tape, given, computed=True)         # and all else that repeats itself
    given_values(tape, given)                       # what repeats something that is given

A program may then be made with one of them in the place of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from aheadgrad.program.tape import Tape
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import OpOverload, is_random
from aheadgrad.torchlayer.symbols import Number

_aten = torch.ops.aten
_REARRANGING = (
    _aten.alias.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
)


def same_values(
    tape: Tape, given: Collection[Value], apart: Iterable[Value] = (), *, computed: bool = False
) -> dict[Value, Value]:
    """What stands for what. A value in `given`, which the program has anyway, stands for others; otherwise
    the first does. Values in the memory of those in `apart` stay: somebody else will see them."""
    return _Same(tape, given, {tape.view_source(v) for v in apart}, computed=computed).found()


def given_values(tape: Tape, given: Collection[Value], apart: Iterable[Value] = ()) -> dict[Value, Value]:
    """What would be computed again though it is given: what was computed first is at hand, then, whichever
    backward that was in."""
    places = {tape.view_source(v) for v in apart}
    same = _Same(tape, given, places, computed=True, across=True).found()
    return {value: one for value, one in same.items() if one in given}


class _Same:
    def __init__(
        self,
        tape: Tape,
        given: Collection[Value],
        apart: set[Value],
        *,
        computed: bool,
        across: bool = False,
    ) -> None:
        self.tape, self.given, self.apart, self.computed, self.across = tape, given, apart, computed, across
        self.first: dict[Value, Value] = {}
        self.groups: dict[Value, list[Value]] = {}
        self.known: dict[Any, Op] = {}
        self.made = set(chain.from_iterable(tape.makers.values()))

    def found(self) -> dict[Value, Value]:
        for op in self.tape.ops:
            if op.viewed is not None:
                back = self._led_back(op) if self.computed and type(op.out) is Value else None
                if back is not None:
                    self._join(op.out, back)
                    continue
            elif not self.computed or not self._repeats(op):
                continue
            before = self._before(op)
            if before is not op:
                for value, first in zip(op.values, before.values, strict=True):
                    self._join(value, first)
        same: dict[Value, Value] = {}
        for group in self.groups.values():
            one = next((v for v in group if v in self.given), group[0])
            same.update((v, one) for v in group if v is not one and v not in self.given)
        return same

    def _before(self, op: Op) -> Op:
        """The same op as it ran first: in the forward, or in the same backward."""
        key = (op.target, key_of(op.args, self._first), key_of(op.kwargs, self._first))
        for phase in ("forward", op.phase):
            if (key, phase) in self.known:
                return self.known[key, phase]
        return self.known.setdefault((key, "forward" if self.across else op.phase), op)

    def _repeats(self, op: Op) -> bool:
        """Would it do the same once more? What makes sizes does not: each has a name of its own."""
        if type(op.target) is not OpOverload or op.keep or op.region is not None or is_random(op.target):
            return False
        outs = [v for v in op.outs if v is not None]
        if not all(type(v) is Value and self.tape.view_source(v) not in self.apart for v in outs):
            return False
        return all(v.op not in self.made for v in outs)

    def _led_back(self, op: Op) -> Value | None:
        """What a chain of views began with, if it ends with the looks of that. Not an input, which the call
        may overwrite; and no further than to what is given."""
        step: Op | None = op
        while step is not None and step.viewed is not None and step.target in _REARRANGING:
            if step.viewed.type == op.out.type:
                return step.viewed if step.viewed.op is not None else None
            if step.viewed in self.given:
                return None
            step = self.tape.of(step.viewed)
        return None

    def _join(self, value: Value, other: Value) -> None:
        first = self._first(other)
        self.first[value] = first
        if self.apart and self.tape.view_source(value) in self.apart:
            return
        self.groups.setdefault(first, [first]).append(value)

    def _first(self, value: Value) -> Value:
        value = self.tape.source(value)
        return self.first.get(value, value)


def key_of(value: Any, first: Callable[[Value], Value]) -> Any:
    """Arguments as something to compare by; `first` gives the value that stands for those like it."""
    if isinstance(value, list | tuple):
        return tuple(key_of(v, first) for v in value)
    if isinstance(value, dict):
        return tuple((k, key_of(v, first)) for k, v in value.items())
    if type(value) is Value or isinstance(value, Tensor):
        return id(first(value) if type(value) is Value else value)
    return type(value), value.expr if type(value) is Number else repr(value)

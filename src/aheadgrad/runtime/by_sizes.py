"""Backwards that assume more about symbolic sizes than their entry: one for each set of sizes.

The entry checks what its own recording assumed. A backward that is recorded later (a second derivative,
a new pattern of tangents) may have to know more: autograd turns a size into a number when it divides by
it, for instance. Such a backward is recorded again with numbers in place of the symbols, for the sizes
at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aheadgrad.program.cut import Sizes
from aheadgrad.program.values import Value
from aheadgrad.runtime.by_values import ByValues
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.symbols import Number

_MOST = 64  # sets of sizes that are remembered


class BySizes:
    """One recording per set of sizes, made when they first come along.

    `shapes`: numbers and values of what will be at hand, and behind them the sizes of the tangents.
    """

    def __init__(self, shapes: list[Any], make: Callable[[Sizes], Any]) -> None:
        self.shapes = shapes
        self.make = make
        self.made: dict[frozenset[Any], Any] = {}

    def find(self, at_hand: list[Any]) -> Any:
        sizes = sizes_from(self.shapes, at_hand)
        key = frozenset(sizes.items())
        with RECORDING:
            if key not in self.made:
                if len(self.made) >= _MOST:
                    self.made.pop(next(iter(self.made)))
                self.made[key] = self.make(sizes)
            made = self.made[key]
        return made.find(at_hand) if isinstance(made, ByValues) else made

    def __call__(self, args: list[Any]) -> list[Any]:
        """As a program of all that is at hand."""
        out: list[Any] = self.find(args)(args)
        return out


def sizes_from(shapes: list[Any], at_hand: list[Any]) -> dict[Any, int | float]:
    """What symbols stand for, by values and the real tensors and numbers in their place."""
    found: dict[Any, int | float] = {}
    for shape, real in zip(shapes, at_hand, strict=True):
        numbers: Any = [(shape, real)]
        if type(shape) is Value and shape.op is None:
            numbers = zip(shape.type.numbers, _numbers(real), strict=True)
        elif type(shape) is Value:  # a backend may have laid it out in another way
            numbers = zip(shape.type.size, real.size(), strict=True)
        elif isinstance(shape, tuple):
            numbers = zip(shape, real.size(), strict=True)
        for number, now in numbers:
            if type(number) is Number and number.expr.is_Symbol:
                found[number.expr] = number.kind(now)
    return found


def _numbers(t: Tensor) -> tuple[Any, ...]:
    return (*t.size(), *((*t.stride(), t.storage_offset()) if t.layout is torch.strided else (0,)))

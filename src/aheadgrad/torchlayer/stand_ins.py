"""Numbers that stand in for symbolic sizes where torch's own C++ insists on numbers.

Some of torch's formulas for derivatives ask a tensor for its sizes as plain numbers. Given the sizes at hand,
what is recorded would hold for these only. So they are given numbers that stand for symbols: large primes.
When such a number, or a product of some, turns up among an op's arguments, the symbols take its place again:

    sizes of `indices`: (s, )   ->   (1299709, )   ->   view(grad, [1299709, -1])   ->   view(grad, [s, -1])

What else C++ may have made of a number (a sum, one over it) cannot be told from other numbers. But it differs
when other primes are given: whoever uses stand-ins records twice, and compares.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor

from aheadgrad.torchlayer.symbols import expression, is_symbolic

_PRIMES = (
    (1299709, 1299721, 1299743, 1299763, 1299791, 1299811),
    (1299817, 1299821, 1299827, 1299833, 1299841, 1299853),
)
_LEAST = 1299709
_ASKS = {
    torch.ops.aten.size.default: lambda t: tuple(t.size()),
    torch.ops.aten.numel.default: lambda t: t.numel(),
    torch.ops.aten.stride.default: lambda t: tuple(t.stride()),
}


class StandIns:
    """The numbers given so far, and what they stand for; `which` of the two sets of primes."""

    def __init__(self, which: int, known: StandIns | None = None) -> None:
        self.unused = list(_PRIMES[which])
        self.primes: dict[Any, int] = {}
        self.meant: dict[int, SymInt] = {} if known is None else dict(known.meant)
        self.given = 0

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Numbers for a question by C++; None if this is no such question, or symbols are not asked for."""
        asks = _ASKS.get(func)
        if asks is None or not isinstance(args[0], Tensor):
            return None
        numbers = asks(args[0])
        if not any(map(is_symbolic, numbers if isinstance(numbers, tuple) else (numbers,))):
            return None
        self.given += 1
        if not isinstance(numbers, tuple):
            return self._number(numbers)
        return tuple(map(self._number, numbers))

    def _number(self, value: Any) -> int:
        if not is_symbolic(value) or expression(value).is_number:
            return int(value)
        expr = expression(value)
        for symbol in sorted(expr.free_symbols - self.primes.keys(), key=str):
            if not self.unused:
                return int(value)  # which the recording then assumes
            self.primes[symbol] = self.unused.pop(0)
        number = expr.xreplace({s: sympy.Integer(p) for s, p in self.primes.items()})
        if not number.is_Integer:
            return int(value)
        if number >= _LEAST:
            self.meant[int(number)] = value
        return int(number)

    def meaning(self, value: Any) -> Any:
        """The same arguments with symbols in place of numbers that stand for them."""
        if type(value) is int:
            return self._meaning(value)
        if type(value) is float and value.is_integer() and abs(value) >= _LEAST:
            meant = self._meaning(int(value))
            return torch.sym_float(meant) if is_symbolic(meant) else value
        if type(value) in (list, tuple):
            return type(value)(map(self.meaning, value))
        if type(value) is torch.Size:
            return tuple(map(self.meaning, value))
        return value

    def _meaning(self, number: int) -> Any:
        size = abs(number)
        if size < _LEAST:
            return number
        found: Any = self.meant.get(size)
        if found is None:
            found = self._product(size)
        return number if found is None else found * int(math.copysign(1, number))

    def _product(self, number: int) -> Any:
        found: Any = None
        for prime, symbol in self.meant.items():
            while number % prime == 0 and number >= _LEAST:
                number //= prime
                found = symbol if found is None else found * symbol
        return None if found is None or number >= _LEAST else found * number

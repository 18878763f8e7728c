"""A backward for sizes that change, compiled under assumptions about them (`s0 <= 4096`).

A forward's assumptions become guards of its entry. Nobody asks guards before a backward: what was compiled
for it is used where its assumptions hold, and for other sizes the program is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from aheadgrad.backends.contract import Boxed
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.symbols import MODULES, expression, is_symbolic, python_text

_MOST = 8
Sizes = Mapping[Any, int]
Compile = Callable[[Sizes], tuple[Boxed, Sequence[Any]]]


class ForSizes:
    """`inputs`: fake tensors and symbolic numbers in place of arguments. `compile` gives what runs for these
    sizes, and what it assumes of them. After `_MOST` kinds of sizes `otherwise` runs."""

    def __init__(self, inputs: Sequence[Any], compile: Compile, otherwise: Callable[[], Boxed]) -> None:
        self.compile, self.otherwise = compile, otherwise
        self.places = _places(inputs)
        self.made: list[tuple[Callable[..., bool], Boxed]] = []

    def add(self, run: Boxed, assumed: Sequence[Any]) -> None:
        names = [str(s) for s in self.places]
        text = " and ".join(f"({python_text(expr)})" for expr in assumed) or "True"
        self.made.append((eval(f"lambda {', '.join(names)}: {text}", dict(MODULES)), run))

    def __call__(self, args: list[Any]) -> list[Any]:
        sizes = [args[i] if d is None else args[i].size(d) for i, d in self.places.values()]
        return (self._find(sizes) or self._made_for(sizes))(args)

    def _find(self, sizes: list[int]) -> Boxed | None:
        return next((run for fits, run in self.made if fits(*sizes)), None)

    def _made_for(self, sizes: list[int]) -> Boxed:
        with RECORDING:
            found = self._find(sizes)
            if found is None:
                if len(self.made) < _MOST:
                    self.add(*self.compile(dict(zip(self.places, sizes, strict=True))))
                else:
                    self.add(self.otherwise(), [])
                found = self._find(sizes)
            assert found is not None, "what was compiled for some sizes holds for them"
            return found


def _places(inputs: Sequence[Any]) -> dict[Any, tuple[int, int | None]]:
    """Where each symbol can be read: an argument that is a number, or the size of a tensor."""
    found: dict[Any, tuple[int, int | None]] = {}
    for i, given in enumerate(inputs):
        shown = list(enumerate(given.size())) if isinstance(given, Tensor) else [(None, given)]
        for d, n in shown:
            if is_symbolic(n) and expression(n).is_Symbol:
                found.setdefault(expression(n), (i, d))
    return found

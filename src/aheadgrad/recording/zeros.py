"""Zeros that autograd knows to be zero: the derivative of `sgn`, for instance.

Eager has a kind of tensor for them that takes no memory, with rules of its own: zero times infinity is
zero there. Functionalization cannot take views of that kind, so a trace has ordinary zeros instead,
remembers which they are, and keeps the rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aheadgrad.torchlayer.dispatch import is_view_op

aten = torch.ops.aten
MADE = aten._efficientzerotensor.default
ZEROS = aten.zeros.default
_ABSORBING = {aten.mul.Tensor: (0, 1), aten.linalg_cross.default: (0, 1), aten.div.Tensor: (0,)}


class Zeros:
    """The known zeros of one trace."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, value: Any) -> None:
        self._known[id(value)] = value

    def absorbs(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Is the result zero because an operand is, whatever the other may be?"""
        return any(id(args[i]) in self._known for i in _ABSORBING.get(func, ()))

    def like(self, out: Tensor) -> tuple[Any, Any, Any]:
        """The op that makes zeros in place of this result."""
        kind = {"dtype": out.dtype, "layout": out.layout, "device": out.device, "pin_memory": False}
        return ZEROS, (list(out.size()),), kind

    def follow(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """A view of known zeros is known too."""
        if isinstance(out, Tensor) and is_view_op(func) and id(args[0]) in self._known:
            self.add(out)

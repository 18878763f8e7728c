"""Who holds a tensor: Python references, told apart from those that C++ has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def references(tensors: Sequence[Tensor]) -> list[int]:
    """How many Python references there are to each of some tensors, besides the one in `tensors`.

    A tensor that C++ holds as well (autograd has saved it) keeps its own Python object alive by one more.
    They are counted without a Python call for each: how many references such a call makes depends on whether
    somebody evaluates frames instead of the interpreter, as Dynamo does.
    """
    counted = list(map(sys.getrefcount, tensors))
    usual = _count_of_one([object()])
    return [n - usual - (t._use_count() > 1) for n, t in zip(counted, tensors, strict=True)]  # type: ignore[attr-defined]


def _count_of_one(held: Sequence[Any]) -> int:
    """What is counted for an object that nobody else holds."""
    return next(map(sys.getrefcount, held))

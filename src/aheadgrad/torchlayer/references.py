"""Who holds a tensor: Python references, told apart from those that C++ has."""

from __future__ import annotations

import sys

from torch import Tensor


def references(t: Tensor) -> int:
    """How many Python references there are to a tensor, besides the one that this call makes.

    A tensor that C++ holds as well (autograd has saved it) keeps its own Python object alive by one more.
    """
    return sys.getrefcount(t) - 2 - (t._use_count() > 1)  # type: ignore[attr-defined]

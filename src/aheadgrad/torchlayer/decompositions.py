"""torch's own decompositions, by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._decomp import get_decompositions


def decompositions_of(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = get_decompositions(ops)
    return found

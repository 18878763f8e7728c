"""Leaves that a function makes of views of its inputs, and that nobody else sees.

Their gradients go nowhere. But once the caller has given the memory of such a view a history, by writing to
it, the view is a leaf no more, and a backward that gets there raises.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor


def keep_viewed(node: Any, *inputs: Tensor) -> None:
    node.viewed = tuple(map(ref, inputs))


def check_viewed(node: Any) -> None:
    for held in node.viewed:
        t = held()
        if t is not None and t.grad_fn is not None:
            raise RuntimeError("leaf variable has been moved into the graph interior")

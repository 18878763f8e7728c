"""Where a function reaches a tensor that it was not given: a closure cell or a global.

A closed-over tensor is read from there at each call, so rebinding the name is noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def reach_from(fn: Any) -> Callable[[Tensor], tuple[Any, str] | None]:
    """A function that finds the place of a tensor: `(holder, expression on the holder)`."""
    fn = inspect.unwrap(fn) if callable(fn) else fn
    cells = list(getattr(fn, "__closure__", None) or ())
    scope = getattr(fn, "__globals__", {})
    code = getattr(fn, "__code__", None)
    names = set(code.co_names) if code is not None else set()

    def find(real: Tensor) -> tuple[Any, str] | None:
        for cell in cells:
            try:
                if cell.cell_contents is real:
                    return cell, ".cell_contents"
            except ValueError:
                continue
        for name in names:
            if scope.get(name) is real:
                return scope, f"[{name!r}]"
        return None

    return find

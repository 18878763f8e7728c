"""Function transforms of `torch.func`, as far as compiling has to know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CODE = torch.func.functionalize(lambda: None).__code__


def without_functionalize(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside `torch.func.functionalize(fn)`: a capture functionalizes anyway."""
    while getattr(fn, "__code__", None) is _CODE:
        fn = fn.__wrapped__  # type: ignore[attr-defined]
    return fn

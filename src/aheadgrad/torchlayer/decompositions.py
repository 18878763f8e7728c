"""Decompositions, by op: torch's own, and those that are always made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

_INDEX = torch.ops.aten.index.Tensor


def decompositions_of(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = get_decompositions(ops)
    return found


def _index(t: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Masks of bytes as truth values: fake tensors refuse them (torch's rule says int8 and means uint8)."""
    if all(i is None or i.dtype is not torch.uint8 for i in indices):
        return NotImplemented
    return _INDEX(t, [i.bool() if i is not None and i.dtype is torch.uint8 else i for i in indices])


ALWAYS: dict[Any, Callable[..., Any]] = {_INDEX: _index}

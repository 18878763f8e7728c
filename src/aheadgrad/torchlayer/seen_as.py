"""How a tensor sees its memory, and other tensors that see the same.

seen_as(t, look_of(t.conj().real[:, 0]))   # what autograd knows as a view of t, like the one on the right
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Look(NamedTuple):
    size: Any
    stride: Any
    offset: Any
    dtype: torch.dtype
    conj: bool
    neg: bool


def look_of(t: Tensor) -> Look:
    return Look(t.size(), t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg())


def seen_as(t: Tensor, look: Look) -> Tensor:
    """A view of the same memory."""
    if t.is_conj():
        t = t.conj()
    if t.is_neg():
        t = torch._neg_view(t)
    if t.dtype != look.dtype:  # elements of the one or of the other size: whole ones of both
        larger = max(t.itemsize, look.dtype.itemsize)
        count = t.untyped_storage().nbytes() // larger * (larger // t.itemsize)
        t = t.as_strided((count,), (1,), 0).view(look.dtype)
    t = t.as_strided(look.size, look.stride, look.offset)
    t = t.conj() if look.conj else t
    return torch._neg_view(t) if look.neg else t

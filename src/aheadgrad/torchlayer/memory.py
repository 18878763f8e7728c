"""Memory of real tensors: whose it is, whether there is any, and how much of it they need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_nowhere(t: Tensor) -> bool:
    """Does a real tensor claim memory that is not there? It was made from a pointer into a traced one."""
    if t.layout is not torch.strided or t.device.type == "meta" or type(t) not in _PLAIN:
        return False
    storage = t.untyped_storage()
    if not storage.nbytes():
        return False
    try:
        return storage.data_ptr() == 0
    except RuntimeError:  # how storages say it by now
        return True


def is_borrowed(t: Tensor) -> bool:
    """Does the memory belong to somebody else: a numpy array, a buffer, a file?"""
    if t.layout is not torch.strided or t.device.type != "cpu" or type(t) is not Tensor:
        return False
    storage = t.untyped_storage()
    return bool(storage.nbytes()) and not storage.resizable()


def reach(size: Any, stride: Any, offset: Any = 0) -> Any:
    """How many elements a memory has to hold for a tensor like this."""
    if any(type(n) is int and n == 0 for n in size):  # symbols are never 0
        return 0
    return 1 + offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))

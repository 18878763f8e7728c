"""Memory of real tensors: whose it is, and whether there is any."""

from __future__ import annotations

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

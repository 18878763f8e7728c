"""Which of torch's functions read values, copy memory, or write to their arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch

from aheadgrad.torchlayer.dispatch import OpOverloadPacket

NEEDS_VALUE = {
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.__array__: "numpy conversion",
    torch.Tensor.data_ptr: "Tensor.data_ptr()",
    torch.Tensor.__dlpack__: "DLPack",
    torch.Tensor.__repr__: "printing a tensor",
    torch.Tensor.apply_: "Tensor.apply_()",
    torch.Tensor.map_: "Tensor.map_()",
    torch.Tensor.map2_: "Tensor.map2_()",
}
COPIES_MEMORY: set[Any] = {torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__}


@functools.cache
def _reshapes(name: str) -> bool:
    """Is this an op that changes sizes, strides or memory in place?"""
    op = getattr(torch.ops.aten, name, None)  # (of a name like `__eq__`, something else of Python's)
    names = op.overloads() if isinstance(op, OpOverloadPacket) else ()
    return any(torch.Tag.inplace_view in getattr(op, o).tags for o in names)


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Does a call change one of its arguments in place, and leave its strides alone?"""
    name = getattr(func, "__name__", "")
    if name.endswith("_"):
        if name == "requires_grad_" or _reshapes(name):
            return False
        return not name.endswith("__") or name == "__setitem__" or name.startswith("__i")
    return kwargs.get("out") is not None or kwargs.get("inplace") is True

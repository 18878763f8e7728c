"""Which of torch's functions read values, copy memory, or write to their arguments."""

from __future__ import annotations

from typing import Any

import torch

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
_KEEPS_NO_STRIDES = {
    "t_",
    "transpose_",
    "swapaxes_",
    "swapdims_",
    "squeeze_",
    "unsqueeze_",
    "as_strided_",
    "resize_",
    "resize_as_",
    "set_",
    "detach_",
    "requires_grad_",
}


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Does a call change one of its arguments in place, and leave its strides alone?"""
    name = getattr(func, "__name__", "")
    if name.endswith("_"):
        if name in _KEEPS_NO_STRIDES:
            return False
        return not name.endswith("__") or name == "__setitem__" or name.startswith("__i")
    return kwargs.get("out") is not None or kwargs.get("inplace") is True

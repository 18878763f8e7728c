"""C++ checks of tensor properties: type, dispatch keys, dtype, device, `requires_grad`, sizes, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def tensor_check(tensors: list[Tensor]) -> Callable[..., bool]:
    """A C++ function that tells whether tensors look like these (and are all different objects)."""
    sizes: list[Any] = [[int(s) for s in t.size()] for t in tensors]
    strides: list[Any] = [[int(s) for s in t.stride()] for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
    check: Callable[..., bool] = guards.check
    return check


def tensor_check_verbose(tensors: list[Tensor], names: list[str]) -> Callable[..., Any]:
    """As `tensor_check`, returns True or a sentence about the first difference."""
    sizes: list[Any] = [[int(s) for s in t.size()] for t in tensors]
    strides: list[Any] = [[int(s) for s in t.stride()] for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )

    def check(*values: Any) -> Any:
        return guards.check_verbose(*values, tensor_check_names=names)

    return check

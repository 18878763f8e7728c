"""C++ checks of tensor properties: type, dispatch keys, dtype, device, `requires_grad`, sizes, strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP


def tensor_check(tensors: list[Tensor], symbolic: Mapping[int, Tensor] | None = None) -> Callable[..., bool]:
    """A C++ function that tells whether tensors look like these (and are all different objects).

    `symbolic` gives, by id, the traced values of those with symbolic sizes, which may be any.
    """
    fakes = [(symbolic or {}).get(id(t), t) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[_fixed(f.size()) for f in fakes],
        dynamic_dims_strides=[_fixed(f.stride()) for f in fakes],
    )
    check: Callable[..., bool] = guards.check
    return check


def _fixed(numbers: Any) -> Any:
    return [None if isinstance(n, torch.SymInt) else int(n) for n in numbers]


def shape_check(fakes: list[Any]) -> Callable[..., bool]:
    """A function that tells whether tensors' sizes meet all that a trace with symbolic sizes assumed."""
    env = fakes[0].fake_mode.shape_env
    text = env.produce_guards_expression(fakes, ignore_static=False)
    code = compile(text or "True", "<sizes>", "eval")
    names = [f"t{i}" for i in range(len(fakes))]

    def check(*tensors: Tensor) -> bool:
        return bool(eval(code, SYMPY_INTERP, {"L": dict(zip(names, tensors, strict=True))}))

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

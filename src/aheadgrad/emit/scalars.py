"""Numbers in ops as tensors that are there already: `torch.mul(x, -2)` makes one each time, which takes
longer than a small product.

The kernels are the same, and so is what they compute: they would turn the number into the type of the
other operand, too. For the small floating types they would not, and are left alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import dispatch_modes, in_transform, no_function_modes

_aten = torch.ops.aten
_WITH_TENSOR = {
    _aten.add.Scalar: _aten.add.Tensor,
    _aten.add.Tensor: _aten.add.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.mul.Scalar: _aten.mul.Tensor,
    _aten.mul.Tensor: _aten.mul.Tensor,
    _aten.rsub.Scalar: _aten.sub.Tensor,
    _aten.sub.Scalar: _aten.sub.Tensor,
    _aten.sub.Tensor: _aten.sub.Tensor,
}

_made: dict[tuple[str, torch.dtype], Tensor] = {}
_MOST = 1024


def with_constant(op: Op) -> Op:
    """The same op of two tensors, if it is one of a tensor and a number."""
    target = _WITH_TENSOR.get(op.target)
    if target is None or op.kwargs or len(op.args) != 2:
        return op
    x, number = op.args
    if type(x) is not Value or type(number) not in (int, float) or x.type.dtype is not op.out.type.dtype:
        return op
    if x.type.dtype not in (torch.float32, torch.float64) or x.type.device.type != "cpu":
        return op
    constant = _constant(number, x.type.dtype)
    if constant is None:
        return op
    return replace(op, target=target, args=(constant, x) if op.target is _aten.rsub.Scalar else (x, constant))


def _constant(number: float, dtype: torch.dtype) -> Tensor | None:
    key = repr(number), dtype
    if key not in _made:
        if dispatch_modes() or not math.isfinite(number) or abs(number) > torch.finfo(dtype).max:
            return None
        with no_function_modes():
            made = torch.tensor(number, dtype=dtype, device="cpu")
        if made.is_inference() or in_transform(made) or len(_made) >= _MOST:
            return None
        _made[key] = made
    return _made[key]

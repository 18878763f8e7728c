"""How generated code calls an op: torch's own function where one means exactly the same.

`torch.mul(x, y)` takes two thirds of the time of `torch.ops.aten.mul.Tensor(x, y)`. Of other ops the part in
C++ is called, without the Python around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from aheadgrad.torchlayer.dispatch import without_frame
from aheadgrad.torchlayer.functions import silu

_T = torch.Tensor
aten = torch.ops.aten

FAST: dict[Any, Callable[..., Any]] = {
    aten.mul.Tensor: torch.mul,
    aten.rsub.Scalar: torch.rsub,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.log.default: torch.log,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.sin.default: torch.sin,
    aten.cos.default: torch.cos,
    aten.relu.default: torch.relu,
    aten.sqrt.default: torch.sqrt,
    aten.rsqrt.default: torch.rsqrt,
    aten.reciprocal.default: torch.reciprocal,
    aten.abs.default: torch.abs,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.select.int: torch.select,
    aten.view.default: _T.view,
    aten.expand.default: _T.expand,
    aten.detach.default: _T.detach,
    aten.cat.default: torch.cat,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.where.self: torch.where,
    aten.zeros_like.default: torch.zeros_like,
    aten.ones_like.default: torch.ones_like,
    aten.clone.default: torch.clone,
    aten.silu.default: silu,
    aten.softplus.default: F.softplus,
    aten.gelu.default: F.gelu,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.stack.default: torch.stack,
    aten.squeeze.dim: torch.squeeze,
    aten.clamp.default: torch.clamp,
    aten.le.Scalar: torch.le,
    aten.lt.Scalar: torch.lt,
    aten.ge.Scalar: torch.ge,
    aten.gt.Scalar: torch.gt,
    aten.eq.Scalar: torch.eq,
    aten.masked_fill.Scalar: torch.masked_fill,
    aten.mul.Scalar: torch.mul,
    aten.div.Scalar: torch.div,
    aten.add.Scalar: torch.add,
    aten.sub.Scalar: torch.sub,
}


def callee(target: Any) -> tuple[Callable[..., Any], str]:
    """What to call for an op, and a readable name for it."""
    fast = FAST.get(target)
    if fast is not None:
        return fast, target.overloadpacket.__name__
    name = str(target).replace(".", "_").replace("<", "").replace(">", "")
    if hasattr(target, "overloadpacket"):
        name = str(target).removesuffix(".default").replace(".", "_")
    return without_frame(target), name if name.isidentifier() else "op"

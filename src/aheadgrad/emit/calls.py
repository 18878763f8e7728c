"""How generated code calls an op: torch's own function where one means exactly the same.

`torch.mul(x, y)` takes two thirds of the time of `torch.ops.aten.mul.Tensor(x, y)`. Of other ops the part in
C++ is called, without the Python around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F

from aheadgrad.torchlayer.dispatch import without_frame
from aheadgrad.torchlayer.functions import silu

# Known by the same name there, as functions or as methods: whichever takes less time.
_FUNCTIONS = """
    mul.Tensor add.Tensor sub.Tensor div.Tensor rsub.Scalar pow.Tensor_Scalar
    log.default sqrt.default rsqrt.default reciprocal.default mm.default bmm.default addmm.default
    permute.default select.int cat.default sum.default sum.dim_IntList
    where.self zeros_like.default ones_like.default native_layer_norm.default
    stack.default clamp.default le.Scalar lt.Scalar ge.Scalar gt.Scalar eq.Scalar
    masked_fill.Scalar mul.Scalar div.Scalar add.Scalar sub.Scalar
"""
_OF_LAYERS = "softplus.default gelu.default"
_METHODS = """
    view.default expand.default detach.default t.default transpose.int unsqueeze.default squeeze.dim
    neg.default exp.default tanh.default sigmoid.default sin.default cos.default relu.default abs.default
    clone.default
"""
FAST: dict[Any, Callable[..., Any]] = {
    attrgetter(op)(torch.ops.aten): getattr(owner, op.partition(".")[0])
    for owner, ops in ((torch, _FUNCTIONS), (F, _OF_LAYERS), (torch.Tensor, _METHODS))
    for op in ops.split()
} | {
    torch.ops.aten.silu.default: silu,
    torch.ops.aten.sym_size.int: torch.Tensor.size,  # those of batched tensors are known to these alone
    torch.ops.aten.sym_stride.int: torch.Tensor.stride,
    torch.ops.aten.sym_storage_offset.default: torch.Tensor.storage_offset,
}


def callee(target: Any, args: Sequence[Any]) -> tuple[Callable[..., Any], str]:
    """What to call for an op with such arguments, and a readable name for it."""
    fast = FAST.get(target)
    if fast is not None:
        return fast, target.overloadpacket.__name__
    name = str(target).replace(".", "_").replace("<", "").replace(">", "")
    if hasattr(target, "overloadpacket"):
        name = str(target).removesuffix(".default").replace(".", "_")
    return without_frame(target, args), name if name.isidentifier() else "op"

"""Ops that write their result over an operand: one that the program made itself and needs no longer.

    mul = torch.mul(t0, s0)
    add = mul.add_(t1)          # in place of torch.add(mul, t1)

The numbers are the same; memory is not asked for, and what is still in the processor's cache is used again.
Operands are taken only if nothing else can be in the same memory. And what a tangent leads to never goes
over what it does not lead to: most backwards may be run for a batch of some tangents at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from aheadgrad.program.program import Program
from aheadgrad.program.slots import Tangent
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import is_view_op

_aten = torch.ops.aten
_T = torch.Tensor
_OVER: dict[Any, tuple[Any, bool]] = {
    _aten.add.Tensor: (_T.add_, True),
    _aten.mul.Tensor: (_T.mul_, True),
    _aten.sub.Tensor: (_T.sub_, False),
    _aten.div.Tensor: (_T.div_, False),
    _aten.mul.Scalar: (_T.mul_, False),
    _aten.div.Scalar: (_T.div_, False),
    _aten.neg.default: (_T.neg_, False),
}
"""What to call instead, and whether either operand will do."""
_FRESH = {
    *_OVER,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.cos.default,
    _aten.exp.default,
    _aten.mm.default,
    _aten.mse_loss_backward.default,
    _aten.pow.Tensor_Scalar,
    _aten.rsub.Scalar,
    _aten.sigmoid.default,
    _aten.sigmoid_backward.default,
    _aten.silu_backward.default,
    _aten.sin.default,
    _aten.sum.dim_IntList,
    _aten.tanh.default,
    _aten.tanh_backward.default,
}
"""Ops whose results have memory of their own, and that leave no views of their operands behind."""
_ZERO_BY_ANY = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_ZERO_BY_ALL = {_aten.add.Tensor, _aten.sub.Tensor, _aten.neg.default}
"""Ops that make zeros without memory of such: autograd gives them as gradients (of `sgn`), and nothing can be
written over them."""


def reused(program: Program) -> dict[Op, tuple[Any, int]]:
    """For ops that can do so: what to call instead, and the number of the operand to write over."""
    if program.role != "backward":
        return {}
    users: dict[Value, list[Op]] = {}
    for op in program.ops:
        for v in dict.fromkeys(op.uses):
            users.setdefault(v, []).append(op)
    behind: dict[Value, set[Value]] = {  # the tangents that lead to a value
        p.value: {p.value} for p in program.inputs if isinstance(p.slot, Tangent)
    }
    for op in program.ops:
        tangents = set().union(*(behind.get(v, ()) for v in op.uses))
        behind.update((v, tangents) for v in op.values)
    free = {
        op.out
        for op in program.ops
        if op.target in _FRESH and all(u.target in _FRESH for u in users.get(op.out, ()))
    }
    free.difference_update(v for v in program.results if type(v) is Value)
    free -= _perhaps_without_memory(program)
    found: dict[Op, tuple[Any, int]] = {}
    for op in program.ops:
        over, either = _OVER.get(op.target, (None, False))
        if over is None or op.kwargs:
            continue
        times = Counter(op.uses)
        for k in (0, 1) if either else (0,):
            x = op.args[k] if k < len(op.args) else None
            if type(x) is not Value or x not in free or users[x][-1] is not op or times[x] > 1:
                continue
            if x.type == op.out.type and (program.unbatched or len(behind[x]) == len(behind[op.out])):
                found[op] = over, k
                break
    return found


def _perhaps_without_memory(program: Program) -> set[Value]:
    """Values that are zeros without memory if tangents are."""
    found = {p.value for p in program.inputs if isinstance(p.slot, Tangent)}
    for op in program.ops:
        by_any = op.target in _ZERO_BY_ANY or is_view_op(op.target)
        if by_any or op.target in _ZERO_BY_ALL:
            known = [v in found for v in op.uses]
            if any(known) if by_any else all(known):
                found.update(op.values)
    return found

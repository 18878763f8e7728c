"""Does a backward that was recorded for tangents of one layout also serve expanded ones?

`f(x).sum().backward()` sends a tangent all of whose strides are 0, not one that is laid out like the output.
Autograd's own formulas run the same ops on either, unless they ask how a gradient is laid out. So it is
enough to look at the ops that are given a tangent, or anything that has other strides because of it: they are
of kinds whose formulas do not ask. What has the same strides as before is the same to everything after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aheadgrad.program.program import Program
from aheadgrad.program.slots import Tangent
from aheadgrad.program.values import Op, Value, map_leaves
from aheadgrad.torchlayer.dispatch import OpOverload, is_view_op
from aheadgrad.torchlayer.kernels import for_real
from aheadgrad.torchlayer.symbols import Number

_aten = torch.ops.aten
_GIVEN_AS_IT_IS = {  # formulas hand the gradient to these ops, and ask nothing before
    _aten.mm.default,
    _aten.bmm.default,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.flip.default,
    _aten.cumsum.default,
    _aten._to_copy.default,
    _aten._softmax_backward_data.default,
    _aten._log_softmax_backward_data.default,
    _aten.native_layer_norm_backward.default,
    _aten.native_batch_norm_backward.default,
    _aten.convolution_backward.default,
    _aten.max_pool2d_with_indices_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _aten.slice_backward.default,
    _aten.select_backward.default,
    _aten.embedding_dense_backward.default,
}
_BY_MEMORY = {
    _aten.as_strided.default,
    _aten.view.dtype,
    _aten.view_as_real.default,
    _aten.view_as_complex.default,
}
_OF_TORCH = re.compile(r"Backward\d+$")  # a custom function's node has no number


def serves(program: Program, layouts: Sequence[Any]) -> bool:
    """Is this backward the one for tangents with these strides, too?"""
    tangents = [p.value for p in program.inputs if isinstance(p.slot, Tangent)]
    if len(tangents) != len(layouts) or not all(map(_is_expanded, tangents, layouts)):
        return False
    try:
        with for_real():
            return _same(program.ops, dict(zip(tangents, layouts, strict=True)))
    except Exception:  # such a view cannot be had, or nobody knows the strides
        return False


def takes(program: Program, layouts: Mapping[Value, Any]) -> bool:
    """Can its ops be run on inputs with these strides? A `view` may have been recorded for others."""
    return in_layouts(program, layouts) is not None


def in_layouts(program: Program, layouts: Mapping[Value, Any]) -> dict[Value, Any] | None:
    """The strides of what its ops make of inputs with these strides; None if they cannot be run on them."""
    other = {v: _empty(v, strides) for v, strides in layouts.items()}
    try:
        with for_real():
            for op in program.ops:
                if any(v in other for v in op.uses):
                    if op.target in _BY_MEMORY:
                        return None
                    other.update(_laid_otherwise(op, other))
    except Exception:
        return None
    return {v: t.stride() for v, t in other.items()}


def _is_expanded(tangent: Value, strides: Any) -> bool:
    """Are the dimensions in the expected order, but for those with stride 0?"""
    if type(strides) is not tuple:
        return False
    kept = sorted((usual, s) for usual, s in zip(tangent.type.stride, strides, strict=True) if s != 0)
    return [s for _, s in kept] == sorted(s for _, s in kept)


def _same(ops: Sequence[Op], layouts: Mapping[Value, Any]) -> bool:
    other = {v: _empty(v, strides) for v, strides in layouts.items() if v.type.stride != strides}
    for op in ops:
        if not any(v in other for v in op.uses):
            continue
        if not _asks_nothing(op):
            return False
        other.update(_laid_otherwise(op, other))
    return True


def _laid_otherwise(op: Op, other: Mapping[Value, Tensor]) -> Iterator[tuple[Value, Tensor]]:
    """Results whose strides come of those of the arguments."""
    for v, now, before in zip(op.outs, _run(op, other), _run(op, {}), strict=True):
        if now is not None and now.stride() != before.stride():
            yield v, now


def _asks_nothing(op: Op) -> bool:
    if op.node is not None and not _OF_TORCH.search(op.node.name):
        return False
    if not isinstance(op.target, OpOverload) or any(type(v) is Number for v in op.outs):
        return False
    if is_view_op(op.target):
        return op.target not in _BY_MEMORY
    return torch.Tag.pointwise in op.target.tags or op.target in _GIVEN_AS_IT_IS


def _run(op: Op, other: Mapping[Value, Tensor]) -> Sequence[Any]:
    """What the op makes, of tensors without memory."""

    def given(value: Any) -> Any:
        if type(value) is Number:
            raise NotImplementedError
        return other[value] if value in other else _empty(value, value.type.stride)

    out = op.target(*map_leaves(op.args, given), **map_leaves(_nowhere(op.kwargs), given))
    return out if isinstance(out, list | tuple) else (out,)


def _nowhere(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.device("meta") if isinstance(v, torch.device) else v for k, v in kwargs.items()}


def _empty(value: Value, strides: Any) -> Tensor:
    return torch.empty_strided(value.type.size, strides, dtype=value.type.dtype, device="meta")

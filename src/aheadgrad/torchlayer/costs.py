"""What ops cost, and which may run again: told by tags, schemas and torch's FLOP formulas."""

from __future__ import annotations

import functools
import math
from enum import IntEnum
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from aheadgrad.torchlayer.control_flow import is_effectful
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable, is_random, is_view_op
from aheadgrad.torchlayer.distributed import is_collective


class Kind(IntEnum):
    """How dear an op is when it runs a second time, from nothing at all to never."""

    VIEW = 0  # takes no memory and no time
    FUSES = 1  # one pass that a fusing compiler joins with its neighbours
    SWEEPS = 2  # a kernel of its own that goes over its arguments a few times
    MATRIX = 3  # arithmetic counts: products, convolutions, attention
    RANDOM = 4  # gives other numbers unless the generator is put back
    NEVER = 5  # somebody else would notice


# No tag tells these: they read and write each element once, and Inductor writes one loop for each.
_LOOPS = """
    _to_copy convert_element_type clone copy broadcast_in_dim expand_copy lift_fresh_copy to type_as
    full full_like empty empty_like empty_strided zeros zeros_like ones ones_like new_zeros new_ones new_full
    new_empty new_empty_strided scalar_tensor arange iota eye fill triu tril
    constant_pad_nd slice_scatter select_scatter diagonal_scatter as_strided_scatter
    index gather index_select embedding take flip roll repeat where masked_fill
    cat stack _unsafe_view reshape view_of
    _low_memory_max_pool_offsets_to_indices max_pool2d_with_indices_backward
""".split()
# torch has a tag for reductions since 2.12.
_REDUCTIONS = """
    sum mean amax amin max min var var_mean std std_mean any all argmax argmin prod logsumexp nansum
    linalg_vector_norm norm count_nonzero sum_to_size _grad_sum_to_size prepare_softmax_online
""".split()
# Attention without a FLOP formula of torch's, products without one, layers that are products inside.
_ARITHMETIC = (
    "attention",
    "_mm",
    "mv",
    "dot",
    "linear",
    "conv",
    "lstm",
    "gru",
    "rnn",
    "fft",
    "linalg",
    "cdist",
)


@functools.cache
def kind_of(target: Any) -> Kind:
    if not isinstance(target, OpOverload):
        return Kind.NEVER
    name = target.overloadpacket.__name__
    if target.namespace not in ("aten", "prims") or is_collective(target) or is_effectful(target):
        return Kind.NEVER
    if is_mutable(target) or not target._schema.returns:
        return Kind.NEVER
    if is_view_op(target):
        return Kind.VIEW
    if target.overloadpacket in flop_registry:
        return Kind.MATRIX
    if name in _REDUCTIONS or name in _LOOPS or torch.Tag.pointwise in target.tags:
        return Kind.FUSES if not is_random(target) else Kind.RANDOM
    if any(part in name for part in _ARITHMETIC):
        return Kind.MATRIX
    return Kind.RANDOM if is_random(target) else Kind.SWEEPS


@functools.cache
def is_reduction(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.overloadpacket.__name__ in _REDUCTIONS


def flops_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """The floating point operations of one call of a matrix op; tensors are given as their sizes.

    By torch's formulas. Where there is none: attention is two products, anything else one.
    """
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=out))
        except (TypeError, ValueError, AssertionError, IndexError):
            pass  # a variant that the formula was not written for
    sizes = [a for a in args if isinstance(a, tuple) and a]
    if len(sizes) >= 3 and "attention" in target.overloadpacket.__name__ and len(sizes[0]) == 4:
        return 2 * math.prod(sizes[0]) * (sizes[1][-2] + sizes[2][-1])
    return 2 * max((math.prod(a) for a in sizes), default=0) * max((a[-1] for a in sizes), default=0)

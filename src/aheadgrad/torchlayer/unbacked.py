"""Sizes that are decided by values: `x[mask]` has as many rows as the mask has true elements.

While a function is recorded such a size is a symbol that no number stands behind (torch calls it unbacked).
The op that makes the tensor is where the number comes from at run time. Nothing may be decided on it.
"""

from __future__ import annotations

from typing import Any

from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from aheadgrad.torchlayer.fake import FakeTensorMode
from aheadgrad.torchlayer.symbols import is_symbolic

__all__ = [
    "DynamicOutputShapeException",
    "follow_values",
    "follows_values",
    "has_no_number",
    "sizes_from_values",
    "sizes_in",
]


def follows_values(mode: FakeTensorMode) -> bool:
    """Can a size be decided by values?"""
    return mode.shape_env is not None


def follow_values(mode: FakeTensorMode) -> None:
    """From now on sizes that values decide are symbols. Reading a value stays an error."""
    mode.shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)


def has_no_number(value: Any) -> bool:
    """Is this a symbolic number that values decide?"""
    return isinstance(value, SymInt) and bool(sizes_from_values(value))


def sizes_from_values(value: Any) -> set[Any]:
    """The symbols in a number that values decide."""
    return set(free_unbacked_symbols(value)) if is_symbolic(value) else set()


def sizes_in(t: Tensor) -> set[Any]:
    """The symbols in a tensor's sizes, strides and offset that values decide."""
    found: set[Any] = set()
    for n in (*t.size(), *t.stride(), t.storage_offset()):
        found |= sizes_from_values(n)
    return found

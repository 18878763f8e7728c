"""Python values that are no tensors: which are compared by value, and how.

A value of a plain kind (numbers, strings, slices, sets, small arrays) is compared with a frozen copy of
itself: exact types, signed zeros and NaN told apart, never through an `__eq__` that a user wrote.
Anything else is compared by identity; what the function reads off it is checked besides (`reach`).
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import pathlib
import types
import uuid
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from aheadgrad.errors import FallbackError

SIMPLE = (int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size)
_AS_THEY_ARE = {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout}
_AS_THEY_ARE |= {torch.memory_format, type(...)}
_BY_TEXT = {float, complex, fractions.Fraction, decimal.Decimal, datetime.date, datetime.timedelta}
_BY_TEXT |= {type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath, uuid.UUID}
_BY_TEXT |= {torch.finfo, torch.iinfo}
_OF_PARTS = {types.MethodType, functools.partial}  # made anew at each `object.method`
_SEQUENCES = {list, tuple, set, frozenset, deque, torch.Size}
_SHOWN = 16  # elements of a container that messages show
_LARGEST = 1 << 16  # bytes of an array that are compared at each call

COMPARED = {slice, range, set, frozenset, bytearray, deque, *_AS_THEY_ARE, *_BY_TEXT, torch.Size}
COMPARED |= {types.MappingProxyType, array}


class Same:
    """Equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and hasattr(kind, "tobytes")


def is_compared(value: Any) -> bool:
    """Is this a value of which a frozen copy tells everything?"""
    return type(value) in COMPARED or type(value) in _OF_PARTS or is_array(value)


def freeze(value: Any) -> Any:
    """What is compared with `==` to tell whether a plain value is the same."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return kind, value
    if kind in _BY_TEXT:
        return kind, repr(value)
    if kind in _SEQUENCES:
        return kind, tuple(map(freeze, value))
    if kind in (dict, types.MappingProxyType):
        return kind, tuple((freeze(k), freeze(v)) for k, v in value.items())
    if kind in (slice, range):
        return kind, freeze(value.start), freeze(value.stop), freeze(value.step)
    if kind is types.MethodType:
        return kind, Same(value.__func__), Same(value.__self__)
    if kind is functools.partial:
        return kind, *map(freeze, (value.func, value.args, value.keywords, vars(value)))
    if kind is array:
        return kind, value.typecode, value.tobytes()
    if kind is bytearray:
        return kind, bytes(value)
    if is_array(value):
        return _frozen_array(value)
    if isinstance(value, list | tuple):
        return kind, tuple(map(freeze, value))
    if isinstance(value, dict):
        return kind, tuple((freeze(k), freeze(v)) for k, v in value.items())
    return Same(value)


def is_too_large(value: Any) -> bool:
    """An array whose contents may change, and are not compared at each call."""
    return is_array(value) and (value.dtype.hasobject or value.nbytes > _LARGEST)


def frozen(value: Any, path: str) -> Any:
    """As `freeze`, for what an entry is about to assume."""
    if is_too_large(value):
        raise FallbackError(
            f"{path} is a numpy array that is too large to be compared at each call, or holds Python "
            "objects; pass a tensor"
        )
    return freeze(value)


def _frozen_array(value: Any) -> Any:
    if is_too_large(value):
        return Same(object())
    contents = (type(value), str(value.dtype), value.tobytes())
    if not hasattr(value, "__setitem__"):  # a scalar
        return contents
    # an array may share its memory with a tensor that the entry keeps
    return (*contents, value.shape, value.strides, Same(value))


def describe(value: Any) -> str:
    """A short text for a value in messages; never through a `__repr__` that a user wrote."""
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, types.FunctionType | type):
        return f"{value.__qualname__}"
    kind = type(value)
    if kind in (slice, range):
        return f"{kind.__name__}({', '.join(map(describe, (value.start, value.stop, value.step)))})"
    if _is_shown(value):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    if kind in (list, tuple, dict, set, frozenset, deque):
        return f"a {kind.__name__} of {len(value)}"
    return f"a {kind.__name__} at {id(value):#x}"


def describe_all(values: Iterable[Any]) -> str:
    return f"[{', '.join(map(describe, values))}]"


def _is_shown(value: Any, depth: int = 3) -> bool:
    """Is the text of a value short, and made without code of the user's?"""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, deque, dict, types.MappingProxyType):
        parts = [*value, *value.values()] if kind in (dict, types.MappingProxyType) else value
        return depth > 0 and 0 < len(value) <= _SHOWN and all(_is_shown(v, depth - 1) for v in parts)
    return kind in SIMPLE or kind in _AS_THEY_ARE or kind in _BY_TEXT

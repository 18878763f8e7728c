"""Python values that are no tensors: which are compared by value, and how.

A value of a plain kind (numbers, strings, slices, containers of such, small arrays) is compared with a frozen
copy of itself: exact types, signed zeros and NaN told apart, never through an `__eq__` that a user wrote.
Anything else is compared by identity.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Mapping
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from uuid import UUID
from weakref import ref

import torch

from aheadgrad.errors import FallbackError
from aheadgrad.recording.containers import is_array, is_too_large

SIMPLE = (int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size)
BY_TEXT = {float, complex, Fraction, Decimal, date, timedelta, UUID, type(Path()), torch.finfo, torch.iinfo}
_BY_VALUE: set[Any] = {*SIMPLE, torch.layout, torch.memory_format} - {*BY_TEXT, torch.Size}
_FOR_EVER = (Enum, type, ModuleType, BuiltinFunctionType, PurePath, EllipsisType)
FIXED: tuple[type, ...] = (*_BY_VALUE, *BY_TEXT, torch.Size, *_FOR_EVER)  # what never changes
_SEQUENCES = {list, tuple, set, frozenset, deque, torch.Size}


class Same:
    """Equal to itself alone; tensors are held weakly."""

    __slots__ = ("_hold",)

    def __init__(self, value: Any) -> None:
        self._hold: Any = ref(value) if isinstance(value, torch.Tensor) else lambda: value

    @property
    def value(self) -> Any:
        return self._hold()

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.value is self.value is not None


def freeze(value: Any, originals: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """What is compared with `==` to tell whether a value is the same; `originals` stand for others, by id.

    It is `Same(value)`, or the type with the value, with its text, or with a tuple of frozen parts (or keys).
    """
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind in BY_TEXT:
        return kind, repr(value)
    if kind in _SEQUENCES:
        return kind, tuple([freeze(part, originals) for part in value])
    if isinstance(value, dict):
        return kind, tuple(map(freeze, value)), tuple([freeze(v, originals) for v in value.values()])
    if kind in (slice, range):
        return kind, (freeze(value.start), freeze(value.stop), freeze(value.step))
    if kind is MethodType:
        return kind, (Same(value.__func__), Same(value.__self__))  # made anew at each `object.method`
    if kind is partial:
        return kind, tuple(map(freeze, (value.func, value.args, value.keywords)))
    if kind is bytearray:
        return kind, bytes(value)
    if is_array(value) and not is_too_large(value):
        return kind, value.tobytes(), str(value.dtype), value.shape
    if isinstance(value, list | tuple):
        return kind, tuple([freeze(part, originals) for part in value])
    if kind is ref:
        return kind, (freeze(value(), originals),)
    return Same(originals.get(id(value), value))


def frozen(value: Any, path: str) -> Any:
    """As `freeze`, for what an entry is about to assume."""
    if is_too_large(value):
        raise FallbackError(f"{path} is a numpy array that is too large to be compared; pass a tensor")
    return freeze(value)


class _Short(reprlib.Repr):
    """Short texts, never through a `__repr__` that a user wrote."""

    def repr_instance(self, x: Any, level: int) -> str:
        kind = type(x)
        if isinstance(x, FunctionType | type):
            return str(x.__qualname__)
        if kind in FIXED or kind in (slice, range):
            return repr(x)
        return "a tensor" if isinstance(x, torch.Tensor) else f"a {kind.__name__} at {id(x):#x}"


_short = _Short()
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = _short.maxfrozenset = 16
describe = _short.repr

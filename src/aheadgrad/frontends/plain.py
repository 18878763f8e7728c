"""Python values that are no tensors: which are compared by value, and how.

A value of a plain kind (numbers, strings, slices, containers of such, small arrays) is compared with a frozen
copy of itself: exact types, signed zeros and NaN told apart, never through an `__eq__` that a user wrote.
Anything else is compared by identity.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from operator import is_
from pathlib import Path, PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from uuid import UUID
from weakref import ref

import torch

from aheadgrad.errors import FallbackError

SIMPLE = (int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size)
BY_TEXT = {float, complex, Fraction, Decimal, date, timedelta, UUID, type(Path()), torch.finfo, torch.iinfo}
_BY_VALUE: set[Any] = {*SIMPLE, torch.layout, torch.memory_format} - {*BY_TEXT, torch.Size}
_FOR_EVER = (Enum, type, ModuleType, BuiltinFunctionType, PurePath, EllipsisType)
FIXED: tuple[type, ...] = (*_BY_VALUE, *BY_TEXT, torch.Size, *_FOR_EVER)  # what never changes
_SEQUENCES = {list, tuple, set, frozenset, deque, torch.Size}
_CAN_CHANGE = (list, dict, set, deque, bytearray)
_LARGEST = 1 << 16  # bytes of an array that are compared at each call


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


def is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and hasattr(kind, "tobytes")


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


def is_too_large(value: Any) -> bool:
    """An array whose contents may change, and are not compared at each call."""
    return is_array(value) and (value.dtype.hasobject or value.nbytes > _LARGEST)


def insides(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The containers and arrays in a value that can change, itself included."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, _CAN_CHANGE) or (is_array(value) and not is_too_large(value)):
        yield value
    if isinstance(value, list | tuple | deque | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from insides(part, seen)


def shares_memory(array: Any, t: torch.Tensor) -> bool:
    start = array.ctypes.data
    return bool(start <= t.data_ptr() < start + array.nbytes)


def frozen(value: Any, path: str) -> Any:
    """As `freeze`, for what an entry is about to assume."""
    if is_too_large(value):
        raise FallbackError(f"{path} is a numpy array that is too large to be compared; pass a tensor")
    return freeze(value)


class Changing:
    """A container or array, and the contents that it has now."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.before: Any = dict(value) if isinstance(value, dict) else value.copy()

    def put_back(self) -> None:
        value, before = self.value, self.before
        if self.is_same():
            return
        if is_array(value):
            value[...] = before
        elif isinstance(value, dict):
            for key in [k for k in value if k not in before]:
                del value[key]
            value.update(before)
        else:
            value.clear()
            value.update(before) if isinstance(value, set) else value.extend(before)

    def is_same(self) -> bool:
        """Are the contents the very same?"""
        value, before = self.value, self.before
        if isinstance(value, dict):
            return list(value) == list(before) and all(map(is_, value.values(), before.values()))
        if isinstance(value, list | deque):
            return len(value) == len(before) and all(map(is_, value, before))
        return value.tobytes() == before.tobytes() if is_array(value) else bool(value == before)


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

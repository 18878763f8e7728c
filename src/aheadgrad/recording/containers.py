"""Containers and arrays of Python's that a run may change: what they hold, and how they get it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from operator import is_
from typing import Any

from torch import Tensor

_CAN_CHANGE = (list, dict, set, deque, bytearray)
_LARGEST = 1 << 16  # bytes of an array that are compared at each call


def is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and hasattr(kind, "tobytes")


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


def shares_memory(array: Any, t: Tensor) -> bool:
    start = array.ctypes.data
    return bool(start <= t.data_ptr() < start + array.nbytes)


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

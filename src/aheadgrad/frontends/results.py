"""What a function returns besides tensors: which objects are the caller's, and which were made inside.

A container that the function was given, or reaches by itself, is returned as that very object. What was
made inside is another object at each call: sets and arrays are copied, other things that can change are left
to eager, as are those that may hold traced tensors.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import numbers
import pathlib
import sys
import types
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.given import is_container
from aheadgrad.frontends.places import is_opened, steps
from aheadgrad.frontends.plain import SIMPLE, is_array
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.symbols import is_symbolic

_FIXED: tuple[type, ...] = (
    *SIMPLE,
    enum.Enum,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    numbers.Number,
)
_FIXED += (fractions.Fraction, decimal.Decimal, pathlib.PurePath, uuid.UUID, torch.finfo, torch.iinfo)
_FIXED += (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, torch.layout)
_FIXED += (torch.memory_format, type(...))
_COPIED = (set, bytearray)

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Kept:
    """A part of the result (at `path`) that is the caller's own: at `given` in the arguments, or `thing`."""

    path: Path
    given: Path | None
    thing: Any = None

    def find(self, arguments: Any) -> Any:
        if self.given is None:
            return self.thing
        for step in self.given:
            arguments = arguments[step]
        return arguments


def kept_parts(result: Any, arguments: Any, reached: Iterable[Any]) -> list[Kept]:
    """The parts of a result that are containers of the caller's."""
    known = {id(v): Kept((), None, v) for v in reached if is_container(v) or is_copied(v)}
    known.update({id(v): Kept((), path) for path, v in _ways(arguments) if len(path) > 1})
    return [Kept(path, known[id(v)].given, known[id(v)].thing) for path, v in _ways(result) if id(v) in known]


def _ways(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if is_container(value) or is_copied(value):
        yield path, value
    if is_opened(value):
        for step, part in steps(value):
            yield from _ways(part, (*path, step))


def replaced(result: Any, path: Path, thing: Any) -> Any:
    """The result with something else at a path."""
    if not path:
        return thing
    part = replaced(result[path[0]], path[1:], thing)
    if not isinstance(result, tuple):
        result[path[0]] = part
        return result
    parts = (*result[: path[0]], part, *result[path[0] + 1 :])
    return parts if type(result) is tuple else type(result)(*parts)


def is_copied(value: Any) -> bool:
    """Something that can change, and that a copy does not share anything with."""
    if type(value) is set:
        return all(isinstance(v, _FIXED) for v in value)
    if is_array(value):
        return hasattr(value, "__setitem__") and not value.dtype.hasobject
    return type(value) in _COPIED


def check_result(result: Any, known: Iterable[Any]) -> None:
    """Refuses what is made inside and returned, if it can be neither copied nor returned again and again."""
    own = {id(v) for v in known}
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            continue
        held = getattr(leaf, "__dict__", None)
        inside = isinstance(held, dict) and any(isinstance(v, Tensor) for v in held.values())
        fixed = id(leaf) in own or _is_fixed(leaf) or is_copied(leaf)
        if inside or not fixed or isinstance(leaf, types.GeneratorType):
            raise FallbackError(
                f"the function returns a {type(leaf).__name__}, which pytree does not know how to open"
            )


def _is_fixed(value: Any) -> bool:
    if isinstance(value, types.FunctionType):  # one that was made inside may hold anything
        named = getattr(sys.modules.get(value.__module__), value.__qualname__, None)
        return named is value
    if isinstance(value, frozenset):
        return all(map(_is_fixed, value))
    if isinstance(value, slice | range):
        return all(isinstance(v, _FIXED) for v in (value.start, value.stop, value.step))
    return isinstance(value, _FIXED) or is_symbolic(value) or (is_array(value) and not is_copied(value))

"""What a function returns: tensors in some structure, and values that each call can return again.

A container that was given, or an object made inside that can change, would be another one than eager's at the
next call: such a function is left to eager.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.plain import FIXED, SIMPLE
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.symbols import is_symbolic


def check_result(result: Any, given: Any, known: Iterable[Any]) -> None:
    """Refuses what no entry can return: `given` are the arguments, `known` objects that are the caller's."""
    theirs = {id(v) for v in known}
    containers = theirs.union(map(id, _containers(given)))
    for part in _containers(result):
        if id(part) in containers:
            raise FallbackError(f"the function returns a {type(part).__name__} that it was given")
    for leaf in pytree.tree_leaves(result):
        if not (isinstance(leaf, Tensor) or id(leaf) in theirs or _is_fixed(leaf)):
            kind = type(leaf).__name__
            raise FallbackError(f"the function returns a {kind}, which pytree does not know how to open")


def _containers(value: Any) -> Iterator[Any]:
    if pytree.is_leaf(value) or (type(value) is tuple and not value):
        return
    if not isinstance(value, tuple):
        yield value
    for part in pytree.parts(value):
        yield from _containers(part)


def _is_fixed(value: Any) -> bool:
    """Can this be returned again and again?"""
    if isinstance(value, types.FunctionType):  # one that was made inside may hold anything
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    if isinstance(value, slice | range):
        parts = value.start, value.stop, value.step
        return all(isinstance(v, SIMPLE) and not is_symbolic(v) for v in parts)
    if isinstance(value, frozenset):
        return all(map(_is_fixed, value))
    return isinstance(value, FIXED) or is_symbolic(value)

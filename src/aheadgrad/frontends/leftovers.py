"""Symbolic numbers that a run leaves inside objects which pytree does not open."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import NeedsNumbers
from aheadgrad.frontends.places import Contents, same
from aheadgrad.frontends.reach import Reach
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.symbols import is_symbolic

_MOST_OBJECTS = 20_000
_NOT_OPENED = (Tensor, type, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType)
_SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


def check_numbers(results: Any) -> None:
    """Of a slice, a set, a closure or an object's attributes no second one is made at the next call, so they
    must not hold a symbolic number. By themselves, or in a `torch.Size`, such numbers are outputs."""
    for leaf in pytree.tree_leaves(results):
        if not is_symbolic(leaf) and not isinstance(leaf, torch.Size) and _holds_symbols(leaf):
            raise NeedsNumbers(f"a symbolic size is left behind in a {type(leaf).__name__}")


def check_state(reach: Reach) -> None:
    """The same for what the run changed within its reach; that is put back."""
    left: list[Any] = []
    new = [slot for n in reach.newcomers for slot in n.slots()]
    for slot in [*reach.slots, *new]:
        now = slot.now()
        if not same(now, slot.value, inside=isinstance(slot, Contents)) and _holds_symbols(now):
            slot.put(slot.value)
            left.append(now)
    functions = [f.holder for f in reach.facts if f.how == ".__code__"]
    if left or any(_holds_symbols(fn.__dict__) for fn in functions):
        raise NeedsNumbers("a symbolic size is left behind in something that the function reaches")


def _holds_symbols(value: Any) -> bool:
    """Is there a symbolic number within reach? Yes, if there is too much to look at."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        value = todo.pop()
        if is_symbolic(value):
            return True
        if isinstance(value, (*_SIMPLE, *_NOT_OPENED)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if len(seen) > _MOST_OBJECTS:
            return True
        todo += _parts(value)
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):  # its globals are looked after elsewhere
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)

"""What the recording run has changed in the user's Python, and how each call of the entry does it again.

    self.scale = 2.0       # was None
    self.cache.append(h)

A place that the code reads is put back to what it was, stays an assumption of the entry, and is
written again by each call: the next call finds it changed, as it does in eager, and has an entry of
its own. A place that the code only writes to is no assumption. Traced tensors are taken out of it and
real ones put there by each call; a counter or a log stays as the recording left it, since Python runs
once per compile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.places import Contents, Slot, same
from aheadgrad.frontends.plain import freeze
from aheadgrad.frontends.reach import Reach
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.symbols import is_symbolic
from aheadgrad.torchlayer.trees import tree_leaves

Change = tuple[Callable[[Any], None], Any]


def take_changes(reach: Reach, originals: dict[int, Tensor]) -> list[Change]:
    """How to leave again what a run has left somewhere, and what that is.

    A container made anew from what stands in for the very tensors it held (`originals`, by id) has not
    changed: recurrent layers do so when their parameters are others than at the last call.
    """
    changes: list[Change] = []
    for slot, now in _changed(reach, originals):
        change = _addition(slot, now) if isinstance(slot, Contents) else (slot.put, now)
        leaves = tree_leaves(now if change is None else change[1])
        if any(map(is_symbolic, leaves)):
            slot.put(slot.value)
            raise FallbackError("the function keeps a size that may be any number")
        traced = _has_traced(leaves)
        read = change is None or reach.is_read(slot, traced=traced)
        if not read and not (traced and isinstance(slot, Slot)):
            reach.forget(slot)
        if not read and not traced:
            continue
        slot.put(slot.value)
        changes.append(change or (slot.put, now))
    reach.contents = [c for c in reach.contents if freeze(c.holder) == c.frozen]
    return changes


def _addition(slot: Contents, now: Any) -> Change | None:
    """How a container got more, if that is all that happened: others may add to it between the calls."""
    before, holder = slot.value, slot.holder
    if isinstance(holder, dict):
        if any(key not in now for key in before):
            return None
        return holder.update, {k: v for k, v in now.items() if k not in before or not same(v, before[k])}
    if isinstance(holder, set):
        known = set(map(id, before))
        return (holder.update, [v for v in now if id(v) not in known]) if len(now) >= len(before) else None
    start, end = list(now)[: len(before)], list(now)[len(before) :]
    return (holder.extend, end) if same(start, before, inside=True) else None


def take_traced(reach: Reach, originals: dict[int, Tensor]) -> None:
    """After an error of the user's: what was changed stays changed, but for traced tensors."""
    for slot, now in _changed(reach, originals):
        leaves = tree_leaves(list(now) if isinstance(now, set) else now)
        if _has_traced(leaves) or any(map(is_symbolic, leaves)):
            slot.put(slot.value)


def _changed(reach: Reach, originals: dict[int, Tensor]) -> list[tuple[Slot | Contents, Any]]:
    found = []
    for slot in [*reach.slots, *(slot for n in reach.newcomers for slot in n.slots())]:
        now = slot.now()
        if same(now, slot.value, inside=isinstance(slot, Contents)):
            continue
        if _rebuilt(now, slot.value, originals):
            slot.put(slot.value)
        else:
            found.append((slot, now))
    return found


def _has_traced(leaves: list[Any]) -> bool:
    return any(isinstance(v, Tensor) and is_wrapped(v) for v in leaves)


def _rebuilt(now: Any, before: Any, originals: dict[int, Tensor]) -> bool:
    """Is this a list of what stands in for the tensors that were listed before?"""
    if type(now) is not list or type(before) is not list:
        return False
    return same([_original(v, originals) for v in now], before, inside=True)


def _original(value: Any, originals: dict[int, Tensor]) -> Any:
    """What a traced tensor (or a weak reference to one) stands for; anything else as it is."""
    if type(value) is weakref.ref:
        original = originals.get(id(value()))
        return value if original is None else weakref.ref(original)
    return originals.get(id(value), value)

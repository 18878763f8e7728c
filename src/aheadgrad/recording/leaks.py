"""Traced tensors that the user's function has left somewhere: in a class, a queue, an object of its own.

Every tensor handed to the function is remembered weakly. After the run, those that somebody still holds
a Python reference to, besides the results and this session, have been left behind. Counting is cheap;
only where a count does not add up is the holder looked for, in all of Python's memory. Autograd's own
keeping (the context of a custom function, a hook) is no leak.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import Counter, OrderedDict
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from aheadgrad.program.values import Origin
from aheadgrad.recording.records import Trace
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.references import references

_CALLABLE = (types.FunctionType, types.MethodType, types.CellType, functools.partial)
_CONTAINERS = (dict, list, tuple, set)
_HOLDS_NONE = (Origin, Trace)  # records are of values, not of what the function sees
_DEEPEST = 8  # steps from a tensor to whoever holds it


class Handed:
    """The tensors that the user's function was given or has made in a session."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._watching = False
        self._seen: dict[int, Tensor] = {}
        self._made: list[weakref.ref[Tensor]] = []
        self._given: list[tuple[weakref.ref[Tensor], int]] = []

    def give(self, seen: dict[int, Tensor]) -> None:
        """What the function is about to get, and how often others than the session hold it by now."""
        self._seen = seen
        own = _held_by(self._session)
        self._watching = True
        self._made = []
        given = list(seen.values())
        self._given = [
            (weakref.ref(t), n - own[id(t)]) for t, n in zip(given, references(given), strict=True)
        ]

    def make(self, out: Any) -> None:
        if not self._watching:
            return
        if isinstance(out, Tensor):
            self._made.append(weakref.ref(out))
        elif type(out) in (list, tuple):
            self._made += [weakref.ref(t) for t in out if isinstance(t, Tensor)]

    def left_behind(self, result: Any) -> bool:
        """Does an object of the user's hold a traced tensor, besides the result?"""
        self._watching = False
        found = self._is_left(result)
        if found:
            gc.collect()  # objects that hold each other may be gone already
            found = self._is_left(result)
        self._seen = {}
        return found

    def _is_left(self, result: Any) -> bool:
        left = self._held_elsewhere(result)
        return bool(left) and _held_by_user(left, self._session, result)

    def _held_elsewhere(self, result: Any) -> list[Tensor]:
        usual = Counter(map(id, pytree.tree_leaves(result)))
        usual += _held_by(self._session)
        usual.update({id(ref()): count for ref, count in self._given})
        refs = [*self._made, *(ref for ref, _ in self._given)]
        alive = list({id(t): t for ref in refs if (t := ref()) is not None}.values())
        t = None
        counts = references(alive)
        return [t for t, n in zip(alive, counts, strict=True) if n > usual[id(t)]]


def _is_looked_into(value: Any) -> bool:
    """Is this a part of ours that may hold tensors of the function?"""
    kind = type(value)
    return kind in _CONTAINERS or (kind.__module__.startswith("aheadgrad.") and kind not in _HOLDS_NONE)


def _held_by(session: Any) -> Counter[int]:
    """By id: how often the session itself holds a tensor (its records hold none of the function's)."""
    found: Counter[int] = Counter()
    for container in _containers_of(session).values():
        found.update(id(v) for v in gc.get_referents(container) if isinstance(v, Tensor))
    return found


def _held_by_user(left: list[Tensor], session: Any, result: Any) -> bool:
    """Looks for those who hold the tensors. Is any of them the user's?"""
    search = Search({id(left), *_containers_of(session), *_containers_in(result)})
    for k in range(len(left)):  # no iterator, which would be one more holder
        holders = search.holders_of(left[k])
        if not all(search.leads_to_autograd(holders[i]) for i in range(len(holders))):
            return True
    return False


class Search:
    """The way up from an object to those who hold it; `ignored` are ids of what does not count."""

    def __init__(self, ignored: set[int]) -> None:
        self.ignored = ignored

    def holders_of(self, value: Any) -> list[Any]:
        found = [h for h in gc.get_referrers(value) if id(h) not in self.ignored and not _is_running(h)]
        self.ignored.add(id(found))  # the list itself holds what was found
        return found

    def leads_to_autograd(self, holder: Any) -> bool:
        """Do all ways up from a holder end at a custom function's context, or at a hook?"""
        seen = {id(holder)}
        level = [holder]
        for _ in range(_DEEPEST):
            self.ignored.add(id(level))
            above: list[Any] = []
            self.ignored.add(id(above))
            for k in range(len(level)):
                if isinstance(level[k], FunctionCtx):
                    continue
                more = self.holders_of(level[k])
                if isinstance(level[k], types.ModuleType | type) or not (more or _is_kept(level[k])):
                    return False
                above += [h for h in more if id(h) not in seen]
                seen.update(map(id, above))
            if not above:
                return True
            level = above
        return False


def _is_running(value: Any) -> bool:
    return isinstance(value, types.FrameType)


def _is_kept(value: Any) -> bool:
    """Is something without holders in Python one that autograd keeps: a hook, a table of hooks?"""
    if isinstance(value, OrderedDict):
        return all(map(callable, value.values()))
    return isinstance(value, _CALLABLE) or type(value).__module__.startswith("torch.")


def _containers_of(session: Any) -> dict[int, Any]:
    """What a session consists of, by id, but for its records."""
    found, todo = {id(session): session}, [session]
    while todo:
        for value in gc.get_referents(todo.pop()):
            if id(value) not in found and _is_looked_into(value):
                found[id(value)] = value
                todo.append(value)
    return found


def _containers_in(result: Any) -> set[int]:
    """The lists, tuples and dictionaries that the result consists of."""
    if not isinstance(result, list | tuple | dict):
        return set()
    parts = result.values() if isinstance(result, dict) else result
    return {id(result)}.union(*map(_containers_in, parts))

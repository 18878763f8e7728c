"""Places in the user's Python: where something was found, and how it is put back."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aheadgrad.frontends.plain import SIMPLE, freeze

ABSENT = object()
OPENED = {list, tuple, deque, dict, OrderedDict, defaultdict}


@dataclass(frozen=True, eq=False)
class Fact:
    """A place (`holder` followed by the text `how`) and what was there; `path` is for people.

    `steady` places are in dictionaries that seldom change: one look at all versions will do.
    """

    holder: Any
    how: str
    value: Any
    path: str
    steady: bool = False


@dataclass(frozen=True, eq=False)
class Content:
    """A set, an array, ...: something that can change inside. `frozen` is what it was."""

    holder: Any
    frozen: Any
    path: str


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that code can rebind: in a dictionary, a class, an object with `__slots__`, a closure's cell.

    `name` is what the code calls it, None where that is not known.
    """

    holder: Any
    key: Any
    value: Any
    name: str | None = None

    def now(self) -> Any:
        if isinstance(self.holder, types.CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return ABSENT
        if isinstance(self.holder, dict):
            return self.holder.get(self.key, ABSENT)
        if isinstance(self.holder, type):
            return vars(self.holder).get(self.key, ABSENT)
        return getattr(self.holder, self.key, ABSENT)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            if value is ABSENT:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = value
        elif value is ABSENT:
            delattr(self.holder, self.key)
        else:
            setattr(self.holder, self.key, value)


@dataclass(frozen=True, eq=False)
class Newcomers:
    """The places in an object's dictionary (or in a class) that were not there before."""

    holder: Any
    before: frozenset[str]

    def slots(self) -> list[Slot]:
        now = vars(self.holder) if isinstance(self.holder, type) else self.holder
        return [Slot(self.holder, key, ABSENT, key) for key in now if key not in self.before]


@dataclass(frozen=True, eq=False)
class Contents:
    """A list, dictionary, set or deque as it was."""

    holder: Any
    value: Any

    def now(self) -> Any:
        return dict(self.holder) if isinstance(self.holder, dict) else self.holder.copy()

    def put(self, value: Any) -> None:
        self.holder.clear()
        if isinstance(self.holder, dict | set):
            self.holder.update(value)
        else:
            self.holder.extend(value)


def same(now: Any, before: Any, inside: bool = False) -> bool:
    if inside:
        if isinstance(now, dict):
            return list(now) == list(before) and all(map(same, now.values(), before.values()))
        if isinstance(now, set):
            return set(map(id, now)) == set(map(id, before))
        return len(now) == len(before) and all(map(same, now, before))
    if now is before:
        return True
    return type(now) is type(before) and _is_plain(now) and bool(freeze(now) == freeze(before))


def _is_plain(value: Any) -> bool:
    """Are two of these the same if they are equal: numbers, strings, tuples of such?"""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, SIMPLE)


@dataclass(frozen=True, eq=False)
class Given:
    """A list, deque or dictionary among the arguments, by the way to it."""

    path: tuple[Any, ...]
    holder: Any
    value: Any

    def put(self, arguments: Any, value: Any) -> None:
        for step in self.path:
            arguments = arguments[step]
        Contents(arguments, None).put(value)


def is_opened(value: Any) -> bool:
    """A container whose parts are found by indices or keys."""
    return type(value) in OPENED or (isinstance(value, tuple) and hasattr(type(value), "_fields"))


def steps(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def containers(value: Any, path: tuple[Any, ...] = ()) -> list[Given]:
    """The lists, deques and dictionaries in a structure of arguments, as they are now."""
    if not is_opened(value):
        return []
    found = [Given(path, value, value.copy())] if len(path) > 1 and not isinstance(value, tuple) else []
    for step, part in steps(value):
        found += containers(part, (*path, step))
    return found


def changed_containers(before: list[Given]) -> list[tuple[Given, Any]]:
    changed = [g for g in before if not same(g.holder, g.value, inside=True)]
    return [(Given(g.path, None, None), g.holder.copy()) for g in changed]  # the way alone: it is kept

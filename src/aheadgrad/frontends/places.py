"""Places in the user's Python: where something was found, and how it is put back."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aheadgrad.frontends.plain import SIMPLE

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
    """A place that code can rebind; `key` is None for a closure cell."""

    holder: Any
    key: Any
    value: Any

    def now(self) -> Any:
        if isinstance(self.holder, types.CellType):
            return self.holder.cell_contents
        return self.holder.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


@dataclass(frozen=True, eq=False)
class Newcomers:
    """The places in an object's dictionary that were not there before."""

    holder: dict[str, Any]
    before: frozenset[str]

    def slots(self) -> list[Slot]:
        return [Slot(self.holder, key, ABSENT) for key in self.holder if key not in self.before]


@dataclass(frozen=True, eq=False)
class Contents:
    """A list or dictionary as it was."""

    holder: Any
    value: Any

    def now(self) -> Any:
        return self.holder.copy()

    def put(self, value: Any) -> None:
        self.holder.clear()
        if isinstance(self.holder, dict):
            self.holder.update(value)
        else:
            self.holder.extend(value)


def same(now: Any, before: Any, inside: bool = False) -> bool:
    if inside:
        if isinstance(now, dict):
            return list(now) == list(before) and all(map(same, now.values(), before.values()))
        return len(now) == len(before) and all(map(same, now, before))
    return now is before or (type(now) is type(before) and isinstance(now, SIMPLE) and bool(now == before))


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
    return [(g, g.holder.copy()) for g in before if not same(g.holder, g.value, inside=True)]

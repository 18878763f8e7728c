"""Containers among the arguments: each is an object of its own, which code can tell (`a is b`, `a.append`).

The recording sees copies of lists and dictionaries. So the same list given twice, or one that the function
also reaches by itself, runs uncompiled, and a check makes sure that no such call takes an entry.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.checks import Checks
from aheadgrad.frontends.undo import is_changeable
from aheadgrad.runtime.emit import Namespace
from aheadgrad.torchlayer import trees as pytree

_KINDS = {list, dict, OrderedDict, defaultdict, deque}


def is_container(value: Any) -> bool:
    """A container that is taken apart, and that code can change."""
    return type(value) in _KINDS


def is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields") and type(value) is not tuple


def changeable(value: Any) -> Iterator[Any]:
    """The containers in a structure of arguments, and the leaves that code can change."""
    if is_container(value) or is_changeable(value):
        yield value
    if not pytree.is_leaf(value):
        for part in pytree.parts(value):
            yield from changeable(part)


def changeable_list(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [v for part in (*args, *kwargs.values()) for v in changeable(part)]


def has_attributes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is there a named tuple with more than its fields, which a copy of it does not have?"""

    def look(value: Any) -> bool:
        if is_named_tuple(value) and getattr(value, "__dict__", None):
            return True
        return not pytree.is_leaf(value) and any(map(look, pytree.parts(value)))

    return any(map(look, (*args, *kwargs.values())))


def refuse_shared(args: tuple[Any, ...], kwargs: dict[str, Any], reached: list[Any]) -> None:
    """What the recording, which sees copies, would get wrong."""
    if has_attributes(args, kwargs):
        raise FallbackError("a named tuple is given that has attributes besides its fields")
    known = {id(v) for v in reached if is_container(v)}
    seen: set[int] = set()
    for value in changeable_list(args, kwargs):
        kind = type(value).__name__
        if id(value) in seen:
            raise FallbackError(f"the same {kind} is given twice")
        if id(value) in known:
            raise FallbackError(f"a {kind} is given that the function also reaches by itself")
        seen.add(id(value))


class GivenWriter:
    """Writes what a check has to say about containers."""

    def __init__(self, checks: Checks, names: Namespace) -> None:
        self.checks = checks
        self.names = names
        self.known: list[str] = []  # how the check calls them

    def note(self, name: str, value: Any) -> None:
        """In the check, a value has this name."""
        if is_container(value) or is_changeable(value):
            self.known.append(name)

    def write(self, reached: list[Any]) -> None:
        """All containers are known by name: none is given twice, nor within reach."""
        self._tests(f"({''.join(f'id({name}), ' for name in self.known)})", len(self.known), reached)

    def write_unopened(self, args: tuple[Any, ...], kwargs: dict[str, Any], reached: list[Any]) -> None:
        """The same where only pytree can find them; the structure is known to be the same by then."""
        count = len(changeable_list(args, kwargs))
        if count:
            found = self.names.name(changeable_list, "changeable_list")
            self.checks.line(f"own = list(map(id, {found}(args, kwargs)))")
            self._tests("own", count, reached)
        if _may_have_attributes((args, kwargs)):
            odd = f"{self.names.name(has_attributes, 'has_attributes')}(args, kwargs)"
            self.checks.unless(f"not {odd}", "named tuples", "no attributes besides fields", "'some'")

    def _tests(self, ids: str, count: int, reached: list[Any]) -> None:
        if count > 1:
            test = f"len(set({ids})) == {count}"
            self.checks.unless(test, "arguments", "lists of their own", "'the same one twice'")
        own = [v for v in reached if is_container(v)]
        if own and count:
            self.names.name(own, "held")  # an id means something as long as its object lives
            test = f"{self.names.name(frozenset(map(id, own)), 'reached')}.isdisjoint({ids})"
            self.checks.unless(test, "arguments", "lists of their own", "'one that the function reaches'")


def _may_have_attributes(value: Any) -> bool:
    if is_named_tuple(value) and hasattr(value, "__dict__"):
        return True
    return not pytree.is_leaf(value) and any(map(_may_have_attributes, pytree.parts(value)))

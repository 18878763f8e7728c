"""The closed table of what a file can hold: frozen values, by name and with their fields.

What is not in it is neither written nor read. Packages further up add their own with `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, get_type_hints

from aheadgrad.codec.hints import Test, accepts
from aheadgrad.facts import facts
from aheadgrad.joint import level
from aheadgrad.options import Policy
from aheadgrad.partition import saved
from aheadgrad.program import slots, values
from aheadgrad.program.program import Program
from aheadgrad.program.tape import Tape
from aheadgrad.torchlayer import subclasses
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.autograd import AutogradNode
from aheadgrad.torchlayer.replay import Drawn, Replayed
from aheadgrad.torchlayer.symbols import Number

_LIVE = {(Program, "made")}  # what others noted beside a program


@dataclass(frozen=True)
class Kind:
    """One kind of object: its fields in order, and how to take it apart and make it.

    `shared`: equal ones are one; otherwise they are told apart by identity.
    """

    name: str
    kind: type
    fields: tuple[str, ...]
    take: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]
    tests: tuple[Test | None, ...]
    shared: bool


KINDS: dict[str, Kind] = {}
BY_TYPE: dict[type, Kind] = {}


def register(*kinds: type, package: str = "") -> None:
    """Adds frozen dataclasses and named tuples; what their annotations say is checked when one is read.

    The name of a package tells those from others that are called the same.
    """
    for kind in kinds:
        names = [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind._fields)  # type: ignore[attr-defined]
        names = [n for n in names if (kind, n) not in _LIVE]
        hints = get_type_hints(kind)
        get = attrgetter(*names) if names else None
        if get is None:
            take: Callable[[Any], tuple[Any, ...]] = _nothing
        else:
            take = get if len(names) > 1 else _single(get)
        shared = not is_dataclass(kind) or kind.__dataclass_params__.eq  # type: ignore[attr-defined]
        tests = tuple(accepts(hints[n]) for n in names)
        known = Kind(
            f"{package}.{kind.__name__}" if package else kind.__name__,
            kind,
            tuple(names),
            take,
            kind,
            tests,
            shared,
        )
        if KINDS.setdefault(known.name, known).kind is not kind:
            raise TypeError(f"there is another kind of object called {known.name}")
        BY_TYPE[kind] = known


def _nothing(value: Any) -> tuple[Any, ...]:
    return ()


def _single(get: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (get(value),)


def _dataclasses(module: Any) -> list[type]:
    here = (v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__)
    return [v for v in here if is_dataclass(v)]


register(
    *_dataclasses(slots),
    *(k for k in _dataclasses(values) if k is not values.Op),
    values.Region,
    *_dataclasses(facts),
    *_dataclasses(level),
    *_dataclasses(saved),
    Program,
    Tape,
    subclasses.Plain,
    subclasses.Fixed,
    subclasses.Form,
    subclasses.Bundle,
    AutocastState,
    AutogradNode,
    Drawn,
    Replayed,
    Number,
    Policy,
)

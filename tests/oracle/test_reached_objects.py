"""Objects, classes and functions that a call reads, changed between calls. Through Dynamo."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .common import plays

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo :UserWarning")  # of what it does in its own way


def one() -> Tensor:
    return torch.ones(1)


class Slotted:
    __slots__ = ("t",)


class Thing:
    inner: Any = None


def test_what_a_class_has() -> None:
    def play(compile: Any) -> Iterator[Any]:
        class Nested:
            s = 2.0

        class Holder:
            table = {"s": 2.0}  # noqa: RUF012
            items = [2.0]  # noqa: RUF012
            act = torch.relu
            nested = Nested
            own = 2.0

            def run(self, x: Tensor) -> Tensor:
                return x * type(self).own

        class Module(nn.Module):
            table = {"s": 2.0}  # noqa: RUF012

            def forward(self, x: Tensor) -> Tensor:
                return x * self.table["s"]

        holder = Holder()
        holder.own = 0.0
        fasts = [
            compile(lambda x: x * Holder.table["s"]),
            compile(lambda x: x * Holder.items[0]),
            compile(lambda x: Holder.act(x)),
            compile(lambda x: x * Holder.nested.s),
            compile(lambda x: holder.run(x)),
            compile(Module()),
        ]
        x = torch.full((1,), -1.0)
        yield from (fast(x) for fast in fasts)
        Holder.table["s"] = Module.table["s"] = Nested.s = Holder.own = 5.0
        Holder.items, Holder.act = [5.0], torch.square
        yield from (fast(x) for fast in fasts)
        Module.table = {"s": 7.0}
        yield fasts[-1](x)

    plays(play)


def test_containers_inside_what_cannot_change() -> None:
    def play(compile: Any) -> Iterator[Any]:
        pair = ([1.0, 2.0], {"a": 1.0})
        added = functools.partial(lambda x, a=1.0, b=2.0: x * a * b, a=2.0)

        def default(x: Tensor, acc: list[float] = [1.0]) -> Tensor:  # noqa: B006
            return x * sum(acc)

        fasts = [
            compile(lambda x: x * sum(pair[0])),
            compile(lambda x: x * sum(pair[1].values())),
            compile(added),
            compile(default),
        ]
        yield from (fast(one()) for fast in fasts)
        pair[0].append(3.0)
        pair[1]["b"] = 3.0
        added.keywords["b"] = 7.0
        default.__defaults__[0].append(3.0)  # type: ignore[index]
        yield from (fast(one()) for fast in fasts)
        pair[0].clear()
        pair[1].clear()
        yield from (fast(one()) for fast in fasts)

    plays(play)


@dataclasses.dataclass
class Setting:
    scale: float = 2.0
    unused: int = 0


def test_dataclasses_that_are_compared_or_shown() -> None:
    def play(compile: Any) -> Iterator[Any]:
        first, default = Setting(), Setting()
        equal = compile(lambda x, c: x * 2 if c == default else x * 3)
        among = compile(lambda x: x * 2 if first in [default] else x * 3)
        shown = compile(lambda x: x * len(repr(first)))
        for scale in (2.0, 9.25, 2.0):
            first.scale = scale
            yield equal(one(), first)
            yield among(one())
            yield shown(one())

    plays(play)


SETTINGS = {"s": 2.0}


class Made:
    def __init__(self) -> None:
        self.k = SETTINGS["s"]


def test_objects_made_inside() -> None:
    def play(compile: Any) -> Iterator[Any]:
        fast = compile(lambda x: x * Made().k)
        for s in (2.0, 5.0):
            SETTINGS["s"] = s
            yield fast(one())
        SETTINGS["s"] = 2.0

    plays(play)


def test_attributes_of_functions() -> None:
    def play(compile: Any) -> Iterator[Any]:
        def f(x: Tensor) -> Tensor:
            return x * f.scale  # type: ignore[attr-defined, no-any-return]

        f.scale = 2.0  # type: ignore[attr-defined]
        fast = compile(f)
        yield fast(one())
        f.scale = 5.0  # type: ignore[attr-defined]
        yield fast(one())

    plays(play)


def test_names_that_were_absent_or_none() -> None:
    def play(compile: Any) -> Iterator[Any]:
        slotted: Any = Slotted()
        table: dict[str, Any] = {"a": None}
        empty: Any = types.SimpleNamespace(a=None)

        fasts = [
            compile(lambda x: x * getattr(slotted, "t", 2.0)),
            compile(lambda x: x * (2 if "a" in table else 5)),
            compile(lambda x: x * (2 if hasattr(empty, "a") else 5)),
        ]
        yield from (fast(one()) for fast in fasts)
        slotted.t = 5.0
        del table["a"], empty.a
        table["b"] = None
        yield from (fast(one()) for fast in fasts)

    plays(play)


def test_another_table_of_attributes() -> None:
    def play(compile: Any) -> Iterator[Any]:
        thing: Any = Thing()
        thing.s = 2.0
        fast = compile(lambda x: x * thing.s)
        yield fast(one())
        thing.__dict__ = {"s": 5.0}
        yield fast(one())

    plays(play)


# ways to a value that the code does not show


def test_ways_around() -> None:
    def play(compile: Any) -> Iterator[Any]:
        thing: Any = Thing()
        thing.s, table = 2.0, {"s": 2.0}
        variable = contextvars.ContextVar("variable", default=2.0)
        numbers, getter, get = array.array("d", [2.0]), operator.attrgetter("s"), table.get
        weak, queue = weakref.ref(thing), collections.deque([thing])
        proxy, tensor = types.MappingProxyType({"o": thing}), torch.ones(1)
        tensor.s = 2.0  # type: ignore[attr-defined]
        cached = functools.lru_cache(lambda n: table["s"])

        def matched(x: Tensor) -> Tensor:
            match thing:
                case Thing(s=s):
                    return x * s  # type: ignore[no-any-return]
            return x

        fasts = [
            compile(f)
            for f in (
                lambda x: x * get("s"),
                lambda x: x * weak().s,
                lambda x: x * variable.get(),
                lambda x: x * numbers[0],
                lambda x: x * queue[0].s,
                lambda x: x * proxy["o"].s,
                lambda x: x * getter(thing),
                lambda x: x * tensor * tensor.s,
                lambda x: x * cached(1),
                lambda x: x * len("{0.s}".format(thing)),  # noqa: UP030, UP032
                matched,
            )
        ]
        yield from (fast(one()) for fast in fasts)
        table["s"] = thing.s = numbers[0] = tensor.s = 5.25  # type: ignore[attr-defined]
        token = variable.set(5.0)
        cached.cache_clear()
        yield from (fast(one()) for fast in fasts)
        variable.reset(token)

    compiled = plays(play, uncompiled=True)
    assert sum(bool(fast.entries) for fast in compiled) > 6  # at the others Dynamo breaks the graph


def test_a_module_made_by_hand() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module: Any = types.ModuleType("by_hand")
        module.s = 2.0
        fast = compile(lambda x: x * module.s)
        yield fast(one())
        module.s = 5.0
        yield fast(one())

    plays(play)


class Odd:
    s = 2.0

    def __mul__(self, other: Any) -> Any:
        return other * 2


def test_operators_and_odd_names() -> None:
    def play(compile: Any) -> Iterator[Any]:
        thing: Any = Odd()
        thing.__f__ = 2.0
        setattr(thing, "a-b", 2.0)
        fasts = [
            compile(lambda x: thing * x),
            compile(lambda x: x * thing.__f__),
            compile(lambda x: x * getattr(thing, "a-b")),
        ]
        multiply = Odd.__mul__
        yield from (fast(one()) for fast in fasts)
        thing.__f__ = 5.0
        setattr(thing, "a-b", 5.0)
        Odd.__mul__ = lambda self, other: other * 5  # type: ignore[method-assign]
        try:
            yield from (fast(one()) for fast in fasts)
        finally:
            Odd.__mul__ = multiply  # type: ignore[method-assign]

    plays(play)


class Delegating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Setting()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.config, name)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale  # type: ignore[no-any-return]


def test_a_name_that_getattr_answers() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Delegating()
        fast = compile(module)
        yield fast(one())
        module.config.scale = 3.0
        yield fast(one())

    plays(play)


@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
def test_attributes_of_arguments_and_deep_structures() -> None:
    def play(compile: Any) -> Iterator[Any]:
        end: Any = None
        for _ in range(1500):
            link = Thing()
            link.inner, end = end, link

        def count(x: Tensor) -> Tensor:
            link, n = end, 0
            while link is not None:
                link, n = link.inner, n + 1
            return x * n

        x = one()
        x.s = 3.0  # type: ignore[attr-defined]
        yield compile(lambda x: x * x.s)(x)
        yield compile(count)(x)

    plays(play, uncompiled=True)  # Dynamo's own recursion ends before the list does

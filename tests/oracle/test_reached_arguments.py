"""Arguments and things closed over whose insides change between calls. Through Dynamo."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from .common import plays

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo :UserWarning")  # of what it does in its own way


def one() -> Tensor:
    return torch.ones(1)


class Slotted:
    __slots__ = ("t",)


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    names: list[str] = dataclasses.field(default_factory=list)
    flags: set[str] = dataclasses.field(default_factory=set)
    table: dict[Any, Any] = dataclasses.field(default_factory=dict)
    other: int = 0


class Nasty:
    """Equal to everything, true of nothing."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


class Keyed:
    def __init__(self, **data: Any) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __len__(self) -> int:
        return len(self._data)


class Loose:
    def __init__(self, **data: Any) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["data"][name]


MUTATIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (Config, lambda c: setattr(c, "scale", c.scale + 1), lambda c: c.scale),
    "list of an attribute": (Config, lambda c: c.names.append("n"), lambda c: len(c.names)),
    "set of an attribute": (Config, lambda c: c.flags.add(str(len(c.flags))), lambda c: len(c.flags)),
    "table of an attribute": (Config, lambda c: c.table.update({(len(c.table),): 1}), lambda c: len(c.table)),
    "slot": (Slotted, lambda c: setattr(c, "t", getattr(c, "t", 1.0) + 1), lambda c: getattr(c, "t", 1.0)),
    "attribute by name": (
        Config,
        lambda c: setattr(c, "scale", c.scale + 1),
        lambda c: getattr(c, "sca" + "le"),
    ),
    "attribute that appears": (
        lambda: Nasty(1.0),
        lambda c: setattr(c, "extra", getattr(c, "extra", 1) + 1),
        lambda c: c.extra if hasattr(c, "extra") else 1,
    ),
    "item": (lambda: Keyed(n=1), lambda c: c._data.update(n=c["n"] + 1), lambda c: c["n"]),
    "length": (lambda: Keyed(n=1), lambda c: c._data.update({str(len(c)): 1}), lambda c: len(c)),
    "computed attribute": (lambda: Loose(n=1), lambda v: v.data.update(n=v.n + 1), lambda v: v.n),
    "chain": (lambda: collections.ChainMap({"n": 1}), lambda v: v.update(n=v["n"] + 1), lambda v: v["n"]),
    "large array": (lambda: numpy.ones(100_000), lambda v: v.__iadd__(1), lambda v: float(v[0])),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_something_that_is_changed_between_calls(name: str) -> None:
    make, change, read = MUTATIONS[name]

    def play(compile: Any) -> Iterator[Any]:
        value = make()
        given, closed_over = compile(lambda x, v: x * read(v)), compile(lambda x: x * read(value))
        for _ in range(3):
            yield given(one(), value), given(one(), value)
            yield closed_over(one()), closed_over(one())
            change(value)

    plays(play)


def test_a_view_of_a_table() -> None:
    def play(compile: Any) -> Iterator[Any]:
        table = {"n": 1}
        view = types.MappingProxyType(table)
        fast = compile(lambda x: x * view["n"])
        for _ in range(3):
            yield fast(one())
            table["n"] += 1

    plays(play)


def test_a_function_given_as_an_argument() -> None:
    def play(compile: Any) -> Iterator[Any]:
        n = 2

        def scaled(t: Tensor) -> Tensor:
            return t * n

        fast = compile(lambda x, f: f(x))
        yield fast(one(), scaled)
        n = 3
        yield fast(one(), scaled)

    plays(play)


def test_methods_and_class_attributes_are_replaced() -> None:
    def play(compile: Any) -> Iterator[Any]:
        class Own:
            factor = 2

            def scaled(self, x: Tensor) -> Tensor:
                return x * self.factor

        thing: Any = Own()
        fast = compile(lambda x: thing.scaled(x))
        changes: list[Callable[[], Any]] = [
            lambda: setattr(Own, "factor", 3),
            lambda: setattr(thing, "factor", 5),
            lambda: setattr(thing, "scaled", lambda x: x * 7),
            lambda: delattr(thing, "scaled"),
        ]
        yield fast(one())
        for change in changes:
            change()
            yield fast(one())

    plays(play)


def test_the_class_of_a_module_is_replaced() -> None:
    class Other(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            return x * 7

    def play(compile: Any) -> Iterator[Any]:
        module = nn.Identity()
        fast = compile(lambda x: module(x) * 2)
        yield fast(one())
        module.__class__ = Other
        yield fast(one())

    plays(play)


def test_code_and_defaults_are_replaced() -> None:
    def play(compile: Any) -> Iterator[Any]:
        def helper(x: Tensor, n: int = 2, *, m: int = 1) -> Tensor:
            return x * n * m

        def other(x: Tensor, n: int = 2, *, m: int = 1) -> Tensor:
            return x + n + m

        fast = compile(lambda x: helper(x))
        yield fast(one())
        helper.__defaults__ = (3,)
        yield fast(one())
        helper.__kwdefaults__ = {"m": 4}
        yield fast(one())
        helper.__kwdefaults__["m"] = 5
        yield fast(one())
        helper.__code__ = other.__code__
        yield fast(one())

    plays(play)


class Anything:
    t: Any = None


def test_an_argument_that_is_a_tensor_within_reach() -> None:
    def play(compile: Any) -> Any:
        held, holder, names = torch.ones(1), Anything(), {"t": torch.ones(1)}
        holder.t = torch.ones(1)
        by_closure = compile(lambda x: x * 2 if x is held else x * 3)
        by_attribute = compile(lambda x: x * 2 if x is holder.t else x * 3)
        by_key = compile(lambda x, y: x * 2 if y is names["t"] else x * 3)
        x, out = torch.ones(1), []
        for t in (x, held, x, torch.zeros(1), held):
            out.append(by_closure(t))
        for t in (x, holder.t, x, names["t"]):
            out.append(by_attribute(t))
        for t in (x, names["t"], x):
            out.append(by_key(torch.ones(2), t))
        holder.t = x
        return [*out, by_attribute(x), by_attribute(torch.ones(1))]

    plays(play)


class Point(collections.namedtuple("Point", "a")):
    pass


def test_named_tuples_with_attributes() -> None:
    def play(compile: Any) -> Any:
        run, out = compile(lambda p: p.a * getattr(p, "k", 1.0)), []
        nested = compile(lambda d, p: p.a * getattr(p, "k", 1.0) * len(d))
        for k in (None, 2.0, 3.0, None):
            point = Point(torch.ones(1))
            if k is not None:
                point.k = k
            out += [run(point), nested(collections.deque([1, 2]), point)]
        return out

    plays(play)


class Losses:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def of(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_the_object_of_a_method_is_changed() -> None:
    def play(compile: Any) -> Iterator[Any]:
        fast, first = compile(lambda x, v: v(x)), Losses(2.0)
        yield fast(one(), first.of)
        first.factor = 7.0
        yield fast(one(), first.of)

    plays(play)

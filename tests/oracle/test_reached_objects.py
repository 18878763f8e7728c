"""Objects, classes and functions that a call reads, changed between calls. The default front end."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from .common import plays

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
            return x * f.scale * getattr(f, "more", 1.0)  # type: ignore[attr-defined, no-any-return]

        f.scale = 2.0  # type: ignore[attr-defined]
        fast = compile(f)
        yield fast(one())
        f.scale = 5.0  # type: ignore[attr-defined]
        yield fast(one())
        f.more = 3.0  # type: ignore[attr-defined]
        yield fast(one())

    plays(play)


def test_names_that_were_absent_or_none() -> None:
    def play(compile: Any) -> Iterator[Any]:
        thing: Any = types.SimpleNamespace()
        slotted: Any = Slotted()
        table: dict[str, Any] = {"a": None}
        empty: Any = types.SimpleNamespace(a=None)

        def caught(x: Tensor) -> Tensor:
            try:
                return x * thing.s
            except Exception:
                return x * 2

        fasts = [
            compile(caught),
            compile(lambda x: x * getattr(slotted, "t", 2.0)),
            compile(lambda x: x * (2 if "a" in table else 5)),
            compile(lambda x: x * (2 if hasattr(empty, "a") else 5)),
        ]
        yield from (fast(one()) for fast in fasts)
        thing.s = slotted.t = 5.0
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

    plays(play)


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


def test_a_name_that_getattr_answers_at_first() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Delegating()
        fast = compile(module)
        yield fast(one())
        module.config.scale = 3.0
        yield fast(one())
        module.scale = 5.0
        yield fast(one())

    plays(play)


def test_a_class_in_between_gets_a_method() -> None:
    def play(compile: Any) -> Iterator[Any]:
        class First(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2

        class Second(First):
            pass

        class Third(Second):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        fast = compile(Third())
        yield fast(one())
        Second.forward = lambda self, x: x * 5  # type: ignore[method-assign]
        yield fast(one())
        del Second.forward
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

    plays(play)


# arguments and what is closed over


@dataclass
class Config:
    scale: float = 2.0
    names: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    table: dict[Any, Any] = field(default_factory=dict)
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


MUTATIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (Config, lambda c: setattr(c, "scale", c.scale + 1), lambda c: c.scale),
    "list of an attribute": (Config, lambda c: c.names.append("n"), lambda c: len(c.names)),
    "set of an attribute": (Config, lambda c: c.flags.add(str(len(c.flags))), lambda c: len(c.flags)),
    "table of an attribute": (Config, lambda c: c.table.update({(len(c.table),): 1}), lambda c: len(c.table)),
    "slot": (lambda: Slotted(1.0), lambda c: setattr(c, "scale", c.scale + 1), lambda c: c.scale),
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
    "array": (lambda: np.ones(3), lambda c: c.__iadd__(1), lambda c: float(c.sum())),
    "array in a list": (lambda: [np.ones(3)], lambda c: c[0].__iadd__(1), lambda c: float(c[0].sum())),
    "bytes": (lambda: bytearray(b"a"), lambda c: c.append(1), len),
    "queue": (collections.deque, lambda c: c.append(1), len),
    "nested list": (lambda: [[1], [2]], lambda c: c[1].append(3), lambda c: sum(map(len, c))),
    "long list": (lambda: [0] * 1000, lambda c: c.__setitem__(999, c[999] + 1), sum),
    "table with odd keys": (lambda: {None: 1}, lambda c: c.update({None: c[None] + 1}), lambda c: c[None]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_argument_that_is_changed_between_calls(name: str) -> None:
    make, change, read = MUTATIONS[name]
    value = make()

    def fn(x: Tensor, value: Any) -> Tensor:
        return x * read(value)

    compiled = strict(fn, max_entries=64)
    for _ in range(4):
        agree(fn, compiled, leaf(3), value)
        agree(fn, compiled, leaf(3), value)
        change(value)


class Names(list[Any]):
    pass


class Loose:
    def __init__(self, **data: Any) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["data"][name]


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list subclass": (lambda: Names([1, 2]), lambda v: v.append(3), sum),
    "item of a list subclass": (lambda: Names([1, 2]), lambda v: v.__setitem__(0, v[0] + 1), sum),
    "computed attribute": (lambda: Loose(n=1), lambda v: v.data.update(n=v.n + 1), lambda v: v.n),
    "chain": (lambda: collections.ChainMap({"n": 1}), lambda v: v.update(n=v["n"] + 1), lambda v: v["n"]),
    "counter": (lambda: collections.Counter(n=1), lambda v: v.update(n=1), lambda v: v["n"]),
    "default": (lambda: collections.defaultdict(int), lambda v: v.update(n=v["n"] + 1), lambda v: v["n"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_odd_containers(name: str) -> None:
    make, change, read = KEPT[name]
    value = make()

    def closed_over(x: Tensor) -> Tensor:
        return x * read(value)

    def given(x: Tensor, value: Any) -> Tensor:
        return x * read(value)

    first, second = strict(closed_over, max_entries=32), strict(given, max_entries=32)
    for _ in range(4):
        agree(closed_over, first, leaf(3))
        agree(given, second, leaf(3), value)
        change(value)


def test_a_view_of_a_table() -> None:
    table = {"n": 1}
    view = types.MappingProxyType(table)

    def fn(x: Tensor) -> Tensor:
        return x * view["n"]

    compiled = strict(fn)
    for _ in range(3):
        agree(fn, compiled, leaf(3))
        table["n"] += 1


def test_functions_given_as_arguments() -> None:
    through(lambda x, f: f(x), (leaf(3), torch.sin), (leaf(3), torch.cos), (leaf(3), lambda t: t * 2))
    n = 2

    def scaled(t: Tensor) -> Tensor:
        return t * n

    compiled = strict(lambda x, f: f(x))
    assert_equal(compiled(leaf(3), scaled), leaf(3) * 2)
    n = 3
    assert_equal(compiled(leaf(3), scaled), leaf(3) * 3)


class Base:
    factor = 2

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_methods_and_class_attributes_are_replaced() -> None:
    class Derived(Base):
        pass

    thing: Any = Derived()

    def fn(x: Tensor) -> Tensor:
        out: Tensor = thing.scaled(x)
        return out

    compiled = strict(fn, max_entries=32)
    changes: list[Callable[[], Any]] = [
        lambda: setattr(Base, "factor", 3),
        lambda: setattr(Derived, "factor", 4),
        lambda: setattr(thing, "factor", 5),
        lambda: setattr(Derived, "scaled", lambda self, x: x * 6),
        lambda: setattr(thing, "scaled", lambda x: x * 7),
        lambda: delattr(thing, "scaled"),
        lambda: delattr(Derived, "scaled"),
        lambda: delattr(Derived, "factor"),
    ]
    agree(fn, compiled, leaf(3))
    for change in changes:
        change()
        agree(fn, compiled, leaf(3))
        agree(fn, compiled, leaf(3))
    Base.factor = 2


def test_code_and_defaults_are_replaced() -> None:
    def helper(x: Tensor, n: int = 2, *, m: int = 1) -> Tensor:
        return x * n * m

    def other(x: Tensor, n: int = 2, *, m: int = 1) -> Tensor:
        return x + n + m

    def fn(x: Tensor) -> Tensor:
        return helper(x)

    compiled = strict(fn, max_entries=32)
    agree(fn, compiled, leaf(3))
    helper.__defaults__ = (3,)
    agree(fn, compiled, leaf(3))
    helper.__kwdefaults__ = {"m": 4}
    agree(fn, compiled, leaf(3))
    helper.__kwdefaults__["m"] = 5
    agree(fn, compiled, leaf(3))
    helper.__code__ = other.__code__
    agree(fn, compiled, leaf(3))


def test_a_large_array_is_refused_by_name() -> None:
    def fn(x: Tensor, data: Any) -> Tensor:
        return x * float(data[0])

    with pytest.raises(FallbackError, match="data is a numpy array"):
        strict(fn)(leaf(3), np.ones(100_000))
    compiled = aheadgrad.compile(fn, frontend="trace")
    data = np.ones(100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(3):
            agree(fn, compiled, leaf(3), data)
            data += 1
        agree(fn, compiled, leaf(3), np.ones(2))
        agree(fn, compiled, leaf(3), data)


def test_an_argument_that_is_a_tensor_within_reach() -> None:
    def play(compile: Any) -> Any:
        held, holder, names = torch.ones(1), Counter(), {"t": torch.ones(1)}
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


def test_the_same_container_twice() -> None:
    def play(compile: Any) -> Any:
        q: list[Any] = [1.0]

        def grow(x: Tensor, a: Any, b: Any) -> Tensor:
            a.append(1.0)
            return x * len(b)

        pairs = compile(lambda x, a, b: x * (2 if a is b else 3))
        known = compile(lambda x, a: x * (2 if a is q else 3) * len(q))
        grows = compile(grow)
        x, out = torch.ones(1), []
        for a, b in (([1.0], [1.0]), (q, q), ([1.0], [1.0]), (q, [1.0])):
            out += [pairs(x, a, b), known(x, a), grows(x, list(a), list(b))]
        for a, b in (({1}, {1}), (s := {1}, s), ({1}, {1})):
            out.append(pairs(x, a, b))
        deques = collections.deque([x]), collections.deque([x])
        out += [pairs(x, *deques), pairs(x, deques[0], deques[0]), pairs(x, *deques)]
        out += [pairs(x, {"a": q}, q)]
        return [*out, grows(x, q, q), len(q), grows(x, q, q), len(q)]

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


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def test_other_methods_and_partials_are_told_apart() -> None:
    def play(compile: Any) -> Any:
        run, x, out = compile(lambda x, v: v(x)), torch.ones(1), []
        first, second = Losses(2.0), Losses(3.0)
        for v in (first.of, second.of, functools.partial(_scaled, factor=3.0), first.of):
            out.append(run(x, v))
        first.factor = 7.0
        out.append(run(x, first.of))
        for factor in (3.0, 4.0, 3):
            out.append(run(x, functools.partial(_scaled, factor=factor)))
        shown = compile(lambda x, v: x * float(v))
        return [*out, *(shown(x, v) for v in (fractions.Fraction(1, 2), fractions.Fraction(1, 3)))]

    plays(play)

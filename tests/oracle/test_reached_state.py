"""State that calls change and read: lists, tables, counters, tensors left somewhere. Through Dynamo."""

from __future__ import annotations

import collections
import functools
import random
import types
import weakref
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


# what a call changes and reads


def test_a_list_that_is_appended_to_and_read() -> None:
    def play(compile: Any) -> Iterator[Any]:
        cache: list[Tensor] = []

        def f(x: Tensor) -> Tensor:
            cache.append(x * 2)
            return torch.cat(cache)

        fast = compile(f)
        for _ in range(4):
            yield fast(one())
        cache.clear()
        yield fast(one())
        yield torch.cat(cache)

    plays(play)


class History(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return x * len(self.seen)


def test_the_length_of_a_list_that_is_appended_to() -> None:
    def play(compile: Any) -> Iterator[Any]:
        fast = compile(History())
        for _ in range(3):
            yield fast(one())

    plays(play)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 2.0
        if self.first:
            self.first = False
            x = x * 10
        return x * self.scale


def test_a_value_that_is_set_on_first_use() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Lazy()
        fast = compile(module)
        for scale in (None, None, 5.0, None):
            module.scale = scale or module.scale
            yield fast(one())
        module.first, module.scale = True, None
        yield fast(one())
        yield module.scale

    plays(play)


class Cached:
    @functools.cached_property
    def scale(self) -> float:
        return 2.0


def test_tables_that_are_filled_on_first_use() -> None:
    def play(compile: Any) -> Iterator[Any]:
        default: Any = collections.defaultdict(lambda: 2.0)
        made = dict[str, float]()

        def f(x: Tensor) -> Tensor:
            if "s" not in made:
                made["s"] = 3.0
            return x * default["s"] * made["s"]

        fast = compile(f)
        yield fast(one())
        yield fast(one())
        default["s"] = 5.0
        yield fast(one())
        made["s"] = 7.0
        yield fast(one())
        made.clear()
        yield fast(one())
        yield dict(made)

    plays(play)


def test_a_property_that_is_cached() -> None:
    def play(compile: Any) -> Iterator[Any]:
        cached = Cached()
        fast = compile(lambda x: x * cached.scale)
        yield fast(one())
        yield fast(one())
        cached.__dict__["scale"] = 11.0
        yield fast(one())

    plays(play, uncompiled=True)  # Dynamo breaks the graph at the lock in there


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.numbers = {"rows": 0}
        self.rows = 0
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows += x.shape[0]
        self.numbers["rows"] += 1
        self.log.append(1)
        return x * 2


def test_counters() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Counting()
        fast = compile(module)
        for n in (1, 2, 1, 1):
            yield fast(torch.ones(n)), module.calls, module.rows, dict(module.numbers), list(module.log)

    plays(play)


def test_a_sum_of_tensors_is_read_by_adding_to_it() -> None:
    def play(compile: Any) -> Iterator[Any]:
        state: Any = types.SimpleNamespace(total=0.0, table={"total": 0.0})

        def f(x: Tensor) -> Tensor:
            state.total += x * 2
            state.table["total"] += x * 3
            return x + 1

        fast = compile(f)
        for _ in range(4):
            yield fast(one())
            yield state.total
            yield state.table["total"]

    plays(play)


def test_an_error_leaves_what_was_set_before_it() -> None:
    def play(compile: Any) -> Iterator[Any]:
        state = types.SimpleNamespace(step=0, last=None)

        def f(x: Tensor) -> Tensor:
            state.step = state.step + 1
            state.last = x * 2
            if state.step == 1:
                raise ValueError("first")
            return x * state.step

        fast = compile(f)
        with pytest.raises(ValueError):
            fast(one())
        yield state.step
        yield fast(one())

    plays(play)


class Counter:
    n = 0


def test_python_runs_once_where_the_graph_breaks() -> None:
    def play(compile: Any) -> Any:
        log: list[float] = []
        counter: Any = Counter()
        counter.n, counter.seen = 0, {}

        def f(x: Tensor) -> Tensor:
            counter.n += 1
            counter.seen[counter.n] = 1
            counter.last = counter.n
            log.append(random.random())
            assert x.grad is None
            return x * counter.n * (2 if x.sum() > 0 else 3)

        random.seed(0)
        run, x = compile(f), torch.ones(2)
        results = [run(x), run(x), run(torch.ones(3)), run(torch.ones(1, 1))]
        return results, counter.n, counter.last, list(counter.seen), log, random.random()

    plays(play)


def test_a_set_or_array_argument_that_is_changed_inside() -> None:
    def play(compile: Any) -> Any:
        def f(x: Tensor, seen: set[int], table: Any) -> Tensor:
            seen.add(len(seen))
            table[0] += 1
            return x * len(seen) + float(table[0])

        run, x, seen, table, out = compile(f), torch.ones(1), {7}, numpy.zeros(2), []
        for _ in range(3):
            out.append(run(x, seen, table))
        return out, sorted(seen), table.tolist(), run(x, {7}, numpy.zeros(2))

    plays(play)


def test_what_is_made_inside_is_new_at_each_call() -> None:
    def play(compile: Any) -> Any:
        def f(x: Tensor) -> Any:
            made = Counter()
            made.n = 1
            return x * 2, {1}, numpy.zeros(2), bytearray(b"ab"), made, [{"k": {2}}], lambda: made.n

        run, x, out = compile(f), torch.ones(1), []
        for _ in range(3):
            y, numbers, array, text, made, nested, later = run(x)
            out += [y, sorted(numbers), array.tolist(), bytes(text), made.n, sorted(nested[0]["k"]), later()]
            numbers.add(9)
            array[0] = 9
            text[0] = 0
            made.n = 9
            nested[0]["k"].clear()
        return out

    plays(play)


def test_what_belongs_to_the_caller_is_returned_itself() -> None:
    def play(compile: Any) -> Any:
        history: list[Any] = []
        thing, seen = Counter(), {3}

        def f(x: Tensor, d: Any, s: Any) -> Any:
            d["y"] = x * 2
            return d, (x, [d["inner"]], s), history, thing, seen

        run, x, out = compile(f), torch.ones(1), []
        for _ in range(3):
            d: dict[str, Any] = {"inner": [torch.zeros(1)]}
            s = {1}
            a, (b, (c,), e), h, t, own = run(x, d, s)
            out += [a is d, b is x, c is d["inner"], e is s, h is history, t is thing, own is seen, d["y"]]
        return out

    plays(play)


def test_nothing_but_a_container_that_is_returned() -> None:
    def play(compile: Any) -> Any:
        whole, d, h = compile(lambda d: d), {"inner": [torch.zeros(1)]}, list[int]()
        return whole(d) is d, whole(h) is h, whole((1, 2))

    plays(play, uncompiled=True)


def test_containers_that_are_changed_inside() -> None:
    class Pair(collections.namedtuple("Pair", "a b")):
        pass

    def play(compile: Any) -> Any:
        def f(x: Tensor, q: Any, d: Any, pair: Any) -> Tensor:
            q.append(x * 2)
            d["n"] = x * 3
            pair.a.append(x * 4)
            return x

        run, x = compile(f), torch.ones(1)
        q: Any = collections.deque(maxlen=2)
        d: Any = collections.defaultdict(list)
        pair = Pair([], 1)
        for _ in range(3):
            run(x, q, d, pair)
        run(x, [], collections.OrderedDict(), pair)
        return list(q), dict(d), len(pair.a), pair.a

    plays(play)


# where tensors are left


class Slotted:
    __slots__ = ("t",)


class Shelf:
    last: Any = None
    table: dict[str, Any] = {}  # noqa: RUF012
    kept: list[Any] = []  # noqa: RUF012


class Thing:
    inner: Any = None


LEAVES: dict[str, tuple[Callable[[Any, Tensor], None], Callable[[Any], Tensor]]] = {
    "class attribute": (lambda p, y: setattr(p.cls, "last", y), lambda p: p.cls.last),
    "new class attribute": (lambda p, y: setattr(p.cls, "other", y), lambda p: p.cls.other),
    "table of a class": (lambda p, y: p.cls.table.update(k=y), lambda p: p.cls.table["k"]),
    "queue": (lambda p, y: p.queue.append(y), lambda p: p.queue[-1]),
    "set": (lambda p, y: p.some.add(y), lambda p: sum(p.some)),
    "slot": (lambda p, y: setattr(p.slotted, "t", y), lambda p: p.slotted.t),
    "function attribute": (lambda p, y: setattr(p.fn, "last", y), lambda p: p.fn.last),
    "bound method": (lambda p, y: p.put(y), lambda p: p.list[-1]),
    "new object": (
        lambda p, y: p.thing.__dict__.update(inner=[Thing(), {"t": y}]),
        lambda p: p.thing.inner[1]["t"],
    ),
    "behind a weak reference": (lambda p, y: setattr(p.weak(), "inner", y), lambda p: p.thing.inner),
    "behind a partial": (lambda p, y: p.partial(y), lambda p: p.thing.inner),
    "tensor attribute": (lambda p, y: setattr(p.tensor, "note", y), lambda p: p.tensor.note),
}


@pytest.mark.parametrize("what", ["an intermediate", "a saved one", "the input"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_tensor_is_left_in(name: str, what: str) -> None:
    leave, read = LEAVES[name]

    def play(compile: Any) -> Iterator[Any]:
        thing, numbers = Thing(), list[Tensor]()
        place = types.SimpleNamespace(cls=type("Own", (Shelf,), {"table": {}}), queue=collections.deque())
        place.some, place.slotted, place.list, place.thing = set(), Slotted(), numbers, thing
        place.put, place.weak, place.tensor = numbers.append, weakref.ref(thing), torch.ones(1)
        place.partial = functools.partial(setattr, thing, "inner")
        place.fn = lambda: None

        def f(x: Tensor) -> Tensor:
            y = x if what == "the input" else x * 2
            leave(place, y)
            return y.exp() if what == "a saved one" else x + 1

        fast = compile(f)
        for i in range(3):
            place.some.clear()
            x = torch.full((1,), float(i), requires_grad=what == "a saved one")
            yield fast(x).detach()
            yield read(place).detach()
        yield len(numbers)
        yield len(place.queue)

    plays(play)


# custom functions


FACTOR = [2.0]


class Factor(torch.autograd.Function):
    scale = 3.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * FACTOR[0] * Factor.scale


def test_what_a_backward_reads() -> None:
    def play(compile: Any) -> Iterator[Any]:
        fast = compile(lambda x: Factor.apply(x))
        x = torch.ones(1, requires_grad=True)
        backward = Factor.backward
        try:
            yield torch.autograd.grad(fast(x), x)[0]
            FACTOR[0] = 5.0
            yield torch.autograd.grad(fast(x), x)[0]
            Factor.scale = 7.0
            yield torch.autograd.grad(fast(x), x)[0]
            Factor.backward = staticmethod(lambda ctx, g: g * 11)  # type: ignore[method-assign, assignment]
            yield torch.autograd.grad(fast(x), x)[0]
        finally:
            FACTOR[0], Factor.scale = 2.0, 3.0
            Factor.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]

    plays(play)


SEEN: list[Tensor] = []


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        SEEN.append(g)
        return g * 2


def test_what_a_backward_leaves() -> None:
    def play(compile: Any) -> Iterator[Any]:
        SEEN.clear()
        fast = compile(lambda x: Logs.apply(x * 1))
        x = torch.ones(1, requires_grad=True)
        for _ in range(3):
            yield torch.autograd.grad(fast(x), x)[0]
            yield list(SEEN)

    plays(play)

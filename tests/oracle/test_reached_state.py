"""State that a function reaches: changed between calls, or by the calls themselves, it is eager's."""

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

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import FallbackWarning

from .common import strict

Play = Callable[[Callable[[Any], Any]], Iterator[Any]]


def values(found: Any) -> Any:
    return found.tolist() if isinstance(found, Tensor) else found


def plays(play: Play, *, uncompiled: bool = False) -> list[Any]:
    """What a play (given a way to compile) gives in eager; compiled, it gives the same."""
    compiled = []

    def compile_it(fn: Any) -> Any:
        found = aheadgrad.compile(fn, frontend="trace") if uncompiled else strict(fn, max_entries=32)
        compiled.append(found)
        return found

    expected = [values(v) for v in play(lambda fn: fn)]
    assert [values(v) for v in play(compile_it)] == expected
    return compiled


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


def test_a_list_that_is_only_appended_to_needs_one_entry() -> None:
    log: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        log.append(x * 2)
        return x + 1

    fast = strict(f)
    for _ in range(4):
        fast(one())
    assert [values(t) for t in log] == [[2.0]] * 4
    assert len(fast.entries) == 1


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

    (fast,) = plays(play)
    assert len(fast.entries) <= 4


class Cached:
    @functools.cached_property
    def scale(self) -> float:
        return 2.0


def test_tables_that_are_filled_on_first_use() -> None:
    def play(compile: Any) -> Iterator[Any]:
        default: Any = collections.defaultdict(lambda: 2.0)
        made, cached = dict[str, float](), Cached()

        def f(x: Tensor) -> Tensor:
            if "s" not in made:
                made["s"] = 3.0
            return x * default["s"] * made["s"] * cached.scale

        fast = compile(f)
        yield fast(one())
        yield fast(one())
        default["s"] = 5.0
        yield fast(one())
        made["s"] = 7.0
        yield fast(one())
        cached.__dict__["scale"] = 11.0
        yield fast(one())
        made.clear()
        yield fast(one())
        yield dict(made)

    plays(play)


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


def test_a_counter_that_nobody_reads_is_no_reason_to_compile_again() -> None:
    module = Counting()
    fast = strict(module)
    for _ in range(3):
        fast(one())
    assert len(fast.entries) == 1
    assert module.calls == 1


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
@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
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
            assert not torch._is_functional_tensor(read(place))
        yield len(numbers)
        yield len(place.queue)

    plays(play, uncompiled=True)


def test_what_autograd_keeps_is_not_left_behind() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return g * ctx.x.detach()

    def f(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda g: g * y.detach())
        made = Thing()
        made.inner = (made, y)  # a circle, which is nobody's any more
        return Keeps.apply(y).sin()  # type: ignore[no-any-return]

    x = torch.ones(3, requires_grad=True)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    (found,) = torch.autograd.grad(strict(f)(x).sum(), x)
    assert torch.equal(expected, found)


# modules that get more


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterList([torch.ones(1)])
        self.mixed = nn.ParameterList([torch.ones(1), 2.0])
        self.register_buffer("b", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for p in self.p:
            x = x * p + 1
        x = x * sum(b.sum() for b in self.buffers())
        return x * self.mixed[1] * sum(p.sum() for p in self.parameters())


def test_parameters_and_buffers_added_later() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Chain()
        fast = compile(module)
        yield fast(one()).detach()
        module.p.append(nn.Parameter(torch.full((1,), 3.0)))
        yield fast(one()).detach()
        module.w = nn.Parameter(torch.ones(1))
        yield fast(one()).detach()
        module.register_buffer("b2", torch.ones(1))
        yield fast(one()).detach()
        module.mixed[1] = 5.0
        yield fast(one()).detach()
        del module.b
        yield fast(one()).detach()

    plays(play)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.ModuleDict({"a": nn.Hardtanh(), "b": nn.Softplus()})

    def forward(self, x: Tensor) -> Tensor:
        for module in self.d.values():
            x = module(x)
        return x


def test_the_order_of_keys() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Branches()
        plain, ordered = {"a": 1.0, "b": 2.0}, collections.OrderedDict(a=1.0, b=2.0)
        fasts = [
            compile(module),
            compile(lambda x: x * next(iter(plain.values()))),
            compile(lambda x: x * next(iter(ordered.values()))),
        ]
        x = torch.full((1,), 3.0)
        yield from (fast(x) for fast in fasts)
        module.d["a"] = module.d.pop("a")
        plain["a"] = plain.pop("a")
        ordered.move_to_end("a")
        yield from (fast(x) for fast in fasts)

    plays(play)


def test_hooks_for_all_modules() -> None:
    def play(compile: Any) -> Iterator[Any]:
        fast = compile(nn.Identity())
        yield fast(one())
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 5)
        try:
            yield fast(one())
        finally:
            handle.remove()
        yield fast(one())

    plays(play)


def test_an_attribute_in_front_of_a_parameter() -> None:
    def play(compile: Any) -> Iterator[Any]:
        torch.manual_seed(0)
        module = nn.Linear(1, 1, bias=False)
        fast = compile(module)
        x = torch.ones(1, 1)
        yield fast(x).detach()
        object.__setattr__(module, "weight", torch.full((1, 1), 5.0))
        yield fast(x).detach()
        object.__delattr__(module, "weight")
        yield fast(x).detach()

    plays(play)


def test_a_graph_module_is_recompiled() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = torch.fx.symbolic_trace(nn.Sequential(nn.Identity(), nn.ReLU()))
        fast = compile(module)
        x = torch.full((1,), -2.0)
        yield fast(x)
        node = next(n for n in module.graph.nodes if n.target == "1")
        node.op, node.target = "call_function", torch.square
        module.recompile()
        yield fast(x)

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


def test_no_traced_tensor_is_left_by_a_backward() -> None:
    SEEN.clear()
    fast = strict(lambda x: Logs.apply(x))
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        assert values(torch.autograd.grad(fast(x), x)[0]) == [2.0]
        assert not any(map(torch._is_functional_tensor, SEEN))
    assert len(fast.entries) == 1


# classes, functions, containers


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


def test_a_field_that_nobody_reads_may_change() -> None:
    setting = Setting()
    fast = strict(lambda x: x * setting.scale if x.shape[0] == 1 else x)
    for i in range(3):
        setting.unused = i
        fast(one())
    assert len(fast.entries) == 1


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


class Shy:
    k = 2.0

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


def test_no_code_of_the_users_makes_messages() -> None:
    table: dict[str, Any] = {"a": Shy()}
    circle: list[Any] = [1.0]
    circle.append(circle)
    fast = strict(lambda x: x * table["a"].k * circle[0])
    assert values(fast(one())) == [2.0]
    table["a"], circle[0] = Shy(), 3.0
    assert values(fast(one())) == [6.0]
    assert len(fast.misses) == 1


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

    plays(play, uncompiled=True)


def test_what_cannot_be_followed_runs_uncompiled() -> None:
    import threading

    local = threading.local()
    local.s = 2.0
    numbers = iter(range(1, 100))
    refused: dict[str, Callable[[Tensor], Tensor]] = {
        "threading.local": lambda x: x * local.s,
        "calls eval": lambda x: x * eval("2.0"),
        "calls globals": lambda x: x * globals()["FACTOR"][0],
        "an iterator": lambda x: x * next(numbers),
        "version counter": lambda x: x * x._version,
    }
    for reason, fn in refused.items():
        with pytest.warns(FallbackWarning, match=reason):
            aheadgrad.compile(fn, frontend="trace")(one())

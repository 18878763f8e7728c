"""The contract of `frontend="trace"`, row by row: what is checked, what is a constant, what is refused.

Checked: arguments, module trees, and what closure cells and globals that the function itself names hold.
Everything else that Python reads is a constant of the recording, as in `jax.jit`. What the function changes
within what is checked cannot be repeated, and is refused; what it changed while being recorded is put back.
"""

from __future__ import annotations

import collections
import functools
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import DataDependentError, FallbackError, FallbackWarning
from aheadgrad.recording import leaks

from .common import assert_equal, strict

NUMBER: Any = 2.0
TENSOR: Any = torch.ones(1)
TABLE: dict[str, Any] = {"n": 2.0}
MODULE: Any = nn.Linear(1, 1)


@pytest.fixture(autouse=True)
def globals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NUMBER", 2.0), ("TENSOR", torch.ones(1)), ("TABLE", {"n": 2.0})):
        monkeypatch.setitem(globals(), name, value)


def x() -> Tensor:
    return torch.ones(1)


# what is checked


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("buffer", torch.ones(1))
        self.inner = nn.Identity()
        self.number = 2.0
        self.table = {"n": [1.0]}
        self.pair = ([1.0], 2)
        self.plain = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.weight * self.buffer * self.plain
        return x * self.number * self.table["n"][0] * self.pair[0][0] * (3 if self.training else 1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda net: setattr(net, "weight", nn.Parameter(torch.full((1,), 5.0))),
    "a buffer": lambda net: setattr(net, "buffer", torch.full((1,), 5.0)),
    "a tensor that is no buffer": lambda net: setattr(net, "plain", torch.full((1,), 5.0)),
    "a submodule": lambda net: setattr(net, "inner", nn.Softplus()),
    "a hook": lambda net: net.inner.register_forward_hook(lambda module, args, out: out * 5),
    "a training flag": lambda net: net.eval(),
    "an attribute": lambda net: setattr(net, "number", 5.0),
    "contents of an attribute": lambda net: net.table["n"].__setitem__(0, 5.0),
    "contents of a tuple": lambda net: net.pair[0].__setitem__(0, 5.0),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", ["itself", "closed over", "given", "a method", "a partial"])
def test_module_trees_are_checked(name: str, way: str) -> None:
    net, args = Net(), tuple[Any, ...]()
    target: Any = net
    if way == "closed over":
        target = lambda x: net(x)  # noqa: E731
    elif way == "given":
        target, args = (lambda x, module: module(x)), (net,)
    elif way == "a method":
        target = net.forward
    elif way == "a partial":
        target = functools.partial(lambda module, x: module(x), net)
    compiled = strict(target)
    for _ in range(2):
        assert_equal(compiled(x(), *args), net(x()))
    before = net(x())
    CHANGES[name](net)
    assert not torch.equal(before, net(x()))
    for _ in range(2):
        assert_equal(compiled(x(), *args), net(x()))


def test_cells_are_checked() -> None:
    number: Any = 2.0
    tensor, table, net = torch.ones(1), {"n": [1.0]}, Net()

    def f(x: Tensor) -> Tensor:
        return net(x) * number * tensor * table["n"][0]

    compiled = strict(f)
    for step in range(6):
        if step == 1:
            number = 3.0
        elif step == 2:
            tensor = torch.full((1,), 5.0)
        elif step == 3:
            table["n"].insert(0, 7.0)
        elif step == 4:
            net = Net().eval()
        elif step == 5:
            number = None
            with pytest.raises(TypeError):
                compiled(x())
            number = torch.full((1,), 11.0)
        assert_equal(compiled(x()), f(x()))
    assert len(compiled.entries) == 5  # a tensor is read at each call, and no reason for another entry


def reads_globals(x: Tensor) -> Tensor:
    return (lambda y: y * NUMBER)(x) * TENSOR * TABLE["n"]  # type: ignore[no-any-return]


def test_globals_are_checked() -> None:
    global NUMBER, TENSOR, TABLE
    compiled = strict(reads_globals)
    assert compiled(x()).item() == 4.0
    NUMBER = 3.0
    assert compiled(x()).item() == 6.0
    TENSOR = torch.full((1,), 2.0)
    assert compiled(x()).item() == 12.0
    TABLE["n"] = 5.0
    assert compiled(x()).item() == 30.0
    TABLE = {"n": 7.0}
    assert compiled(x()).item() == 42.0
    assert len(compiled.entries) == 4


class Thing:
    scale: Any = 2.0


def test_other_objects_are_the_same_or_recorded_anew() -> None:
    first, second = Thing(), Thing()
    second.scale = 5.0
    compiled = strict(lambda x, thing: x * thing.scale)
    assert [compiled(x(), thing).item() for thing in (first, second, first)] == [2.0, 5.0, 2.0]
    assert len(compiled.entries) == 2


# what is a constant


def helper(x: Tensor) -> Tensor:
    return x * NUMBER  # type: ignore[no-any-return]


def constants() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], Callable[[], Any]]]:
    thing, own, n = Thing(), type("Own", (Thing,), {}), 2.0
    things, module = [Thing()], types.SimpleNamespace(scale=2.0)

    def inner(x: Tensor) -> Tensor:
        return x * n

    def change_n() -> None:
        nonlocal n
        n = 5.0

    def default(x: Tensor, more: list[float] = [2.0]) -> Tensor:  # noqa: B006
        return x * more[0]

    return {
        "attribute of a given object": (
            lambda x, thing: x * thing.scale,
            (thing,),
            lambda: setattr(thing, "scale", 5.0),
        ),
        "attribute of an object in a cell": (
            lambda x: x * module.scale,
            (),
            lambda: setattr(module, "scale", 5.0),
        ),
        "attribute of an object in a list": (
            lambda x: x * things[0].scale,
            (),
            lambda: setattr(things[0], "scale", 5.0),
        ),
        "attribute of a class": (lambda x: x * own.scale, (), lambda: setattr(own, "scale", 5.0)),
        "global of a helper": (lambda x: helper(x), (), lambda: globals().__setitem__("NUMBER", 5.0)),
        "cell of a helper": (lambda x: inner(x), (), change_n),
        "global by a name that is computed": (
            lambda x: x * globals()["NUM" + "BER"],
            (),
            lambda: globals().__setitem__("NUMBER", 5.0),
        ),
        "contents of a default": (default, (), lambda: default.__defaults__[0].__setitem__(0, 5.0)),  # type: ignore[index]
    }


@pytest.mark.parametrize("name", constants())
def test_everything_else_is_a_constant_of_the_recording(name: str) -> None:
    fn, args, change = constants()[name]
    compiled = strict(fn)
    assert compiled(x(), *args).item() == 2.0
    change()
    assert fn(x(), *args).item() == 5.0
    assert compiled(x(), *args).item() == 2.0
    assert compiled(torch.ones(1, 1), *args).item() == 5.0  # another recording reads it again


# what is refused: side effects


class Changing(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("buffer", torch.ones(1))
        self.count, self.log, self.table = 0, list[int](), {"n": 0}
        self.inner = nn.Identity()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        out: Tensor = self.inner(x) * self.weight * self.buffer
        return out

    def seen(self) -> Any:
        parts = [t.detach().clone() for t in (self.weight, self.buffer)]
        names = (
            sorted(n for n in vars(self) if not n.startswith("_")),
            list(self._modules),
            list(self._buffers),
        )
        return parts, self.count, list(self.log), dict(self.table), names, len(self.inner._forward_hooks)


SIDE_EFFECTS: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "counter": ("count", lambda m, x: setattr(m, "count", m.count + 1)),
    "list": ("log", lambda m, x: m.log.append(1)),
    "table": ("table", lambda m, x: m.table.update(n=m.table["n"] + 1)),
    "new attribute": ("last", lambda m, x: setattr(m, "last", m.count)),
    "tensor attribute": ("last", lambda m, x: setattr(m, "last", x * 2)),
    "buffer": ("buffer", lambda m, x: setattr(m, "buffer", m.buffer + 1)),
    "new buffer": ("more", lambda m, x: m.register_buffer("more", x * 2)),
    "parameter": ("", lambda m, x: setattr(m, "weight", nn.Parameter(m.weight.detach() + 1))),
    "submodule": ("inner", lambda m, x: setattr(m, "inner", nn.ReLU())),
    "hook": ("_forward_hooks", lambda m, x: m.inner.register_forward_hook(lambda *args: args[2] * 2)),
}


@pytest.mark.parametrize("name", SIDE_EFFECTS)
def test_side_effects_on_modules(name: str) -> None:
    what, change = SIDE_EFFECTS[name]
    module, eager = Changing(change), Changing(change)
    before = module.seen()
    compiled = strict(module)
    for _ in range(2):
        reason = f"the function changes .*{what}.*which a recording cannot" if what else "cannot be compiled"
        with pytest.raises(FallbackError, match=reason):
            compiled(x())
        assert_equal(module.seen(), before)
    run = aheadgrad.compile(module, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(3):
            assert_equal(run(x()), eager(x()))
            assert_equal(module.seen(), eager.seen())


def test_side_effects_on_cells() -> None:
    count, log = 0, list[Any]()
    queue, table = collections.deque[Any](), {"n": [0]}

    def number(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * 2

    functions: dict[str, Callable[[Tensor], Any]] = {
        "count": number,
        "log": lambda x: (log.append(x), x * 2)[1],
        "queue": lambda x: (queue.append(1), x * 2)[1],
        "table": lambda x: (table["n"].append(1), x * 2)[1],
    }
    for name, fn in functions.items():
        with pytest.raises(FallbackError, match=f"the function changes {name}"):
            strict(fn)(x())
        assert (count, log, list(queue), table["n"]) == (0, [], [], [0])
        with pytest.warns(FallbackWarning, match=f'changes {name}.*frontend="dynamo" can'):
            aheadgrad.compile(fn, frontend="trace")(x())
        assert (count, len(log), len(queue), table["n"]).count(1) or table["n"] == [0, 1]
        count = 0
        log.clear()
        queue.clear()
        table["n"] = [0]


def sets_a_global(x: Tensor) -> Tensor:
    global NUMBER
    NUMBER += 1.0
    return x * 2


def test_side_effects_on_globals() -> None:
    with pytest.raises(FallbackError, match="the function changes"):
        strict(sets_a_global)(x())
    assert NUMBER == 2.0
    with pytest.warns(FallbackWarning, match="the function changes"):
        aheadgrad.compile(sets_a_global, frontend="trace")(x())
    assert NUMBER == 3.0


class Names(list[Any]):
    pass


def test_side_effects_on_arguments() -> None:
    changes: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "list": (lambda: [1.0], lambda v: v.append(2.0)),
        "dict": (lambda: {"a": 1.0}, lambda v: v.update(b=2.0)),
        "dict of a list": (lambda: {"a": [1.0]}, lambda v: v["a"].append(1.0)),
        "set": (lambda: {1}, lambda v: v.add(2)),
        "bytearray": (lambda: bytearray(b"a"), lambda v: v.append(1)),
        "array": (lambda: numpy.zeros(2), lambda v: v.__setitem__(0, 1.0)),
        "list of one's own kind": (lambda: Names([1.0]), lambda v: v.append(2.0)),
    }
    for name, (make, change) in changes.items():
        given, expected = make(), make()
        with pytest.raises(FallbackError, match="the function changes"):
            strict(lambda x, v, change=change: (change(v), x * 2)[1])(x(), given)
        assert str(given) == str(expected), name
        with pytest.warns(FallbackWarning, match="the function changes"):
            aheadgrad.compile(lambda x, v, change=change: (change(v), x * 2)[1], frontend="trace")(x(), given)
        change(expected)
        assert str(given) == str(expected), name


def test_random_numbers_of_python_and_numpy() -> None:
    def play(compile: Any) -> Any:
        random.seed(0)
        numpy.random.seed(0)
        fasts = compile(lambda x: x * random.random()), compile(lambda x: x * numpy.random.rand())
        return [fast(x()) for fast in fasts for _ in range(3)]

    with pytest.warns(FallbackWarning, match="random numbers of Python or numpy"):
        found = play(functools.partial(aheadgrad.compile, frontend="trace"))
    assert_equal(play(lambda fn: fn), found)


def test_a_tensor_that_is_left_in_an_object_is_refused() -> None:
    thing = Thing()

    def f(x: Tensor) -> Tensor:
        thing.scale = x * 2
        return x + 1

    with pytest.raises(FallbackError, match="leaves a tensor somewhere"):
        strict(f)(x())
    with pytest.warns(FallbackWarning, match="leaves a tensor somewhere"):
        aheadgrad.compile(f, frontend="trace")(x())
    assert thing.scale.item() == 2.0


def test_whom_frames_are_run_by_makes_no_difference_to_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once Dynamo has failed it stands behind every Python call, which holds its arguments longer."""

    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(breaks, backend="eager", fullgraph=True)(x())
    looked: list[Any] = []
    monkeypatch.setattr(leaks, "_held_by_user", lambda *_: bool(looked.append(None)))
    strict(lambda x: (x * 2).sin().sum())(x().requires_grad_()).backward()
    assert not looked


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
        made.scale = (made, y)  # a circle, which is nobody's any more
        return Keeps.apply(y).sin()  # type: ignore[no-any-return]

    x = torch.ones(3, requires_grad=True)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    (found,) = torch.autograd.grad(strict(f)(x).sum(), x)
    assert torch.equal(expected, found)


# what happens once


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 2.0
        return x * self.scale


def test_what_changes_something_once_is_tried_again() -> None:
    module = Lazy()
    compiled = aheadgrad.compile(module, frontend="trace")
    with pytest.warns(FallbackWarning, match="the function changes scale"):
        assert compiled(x()).item() == 2.0
    assert [compiled(x()).item() for _ in range(3)] == [2.0] * 3
    assert len(compiled.entries) == 1
    assert list(compiled.fallbacks.values()) == [1]


def test_what_changes_something_each_time_is_tried_twice() -> None:
    module, runs = Changing(lambda m, x: setattr(m, "count", m.count + 1)), Thing()
    runs.scale = 0
    module.inner.register_forward_hook(lambda *args: setattr(runs, "scale", runs.scale + 1))
    compiled = aheadgrad.compile(module, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(5):
            compiled(x())
    assert module.count == 5
    assert runs.scale == 5 + 2  # two recordings
    assert list(compiled.fallbacks.values()) == [5]


# values, and what is returned

READS: list[Callable[[Tensor], Any]] = [
    lambda x: x * x.sum().item(),
    lambda x: x * 2 if x.sum() > 0 else x * 3,
    lambda x: x * float(x[0]),
    lambda x: x * len(x.tolist()),
]


@pytest.mark.parametrize("fn", READS)
def test_a_value_is_read(fn: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentError, match=r'test_trace_contract\.py(.|\n)*frontend="dynamo"'):
        strict(fn)(x())
    compiled = aheadgrad.compile(fn, frontend="trace")
    with pytest.warns(FallbackWarning, match='frontend="dynamo"'):
        assert_equal(compiled(x()), fn(x()))
    for n in (2, 3):
        assert_equal(compiled(torch.ones(n)), fn(torch.ones(n)))
    assert list(compiled.fallbacks.values()) == [3]


def test_what_cannot_be_returned_again_and_again() -> None:
    held, table = [1.0], {"a": [1.0]}
    refused: list[Callable[[Tensor, Any], Any]] = [
        lambda x, v: (x * 2, {1}),
        lambda x, v: (x * 2, numpy.zeros(2)),
        lambda x, v: (x * 2, bytearray(b"ab")),
        lambda x, v: (x * 2, Thing()),
        lambda x, v: (x * 2, lambda: x),
        lambda x, v: (x * 2, v),
        lambda x, v: (x * 2, [v]),
        lambda x, v: (x * 2, held),
        lambda x, v: (x * 2, table["a"]),
    ]
    for fn in refused:
        with pytest.raises(FallbackError, match="the function returns"):
            strict(fn)(x(), [1.0])
        given = [1.0]
        with pytest.warns(FallbackWarning, match="the function returns"):
            found = aheadgrad.compile(fn, frontend="trace")(x(), given)
        expected = fn(x(), given)
        assert type(found[1]) is type(expected[1])
        assert (found[1] is given) == (expected[1] is given)
        assert (found[1] is held) == (expected[1] is held)
    allowed = strict(lambda x: (x * 2, [1], {"a": (2, None)}, slice(2), frozenset([1]), torch.float32, Thing))
    first, second = allowed(x()), allowed(x())
    assert_equal(first, second)
    assert first[1] is not second[1]


_numbers: list[float] = [1.0, 2.0]


def test_containers_that_are_replaced_by_equal_ones_and_changed_then() -> None:
    """The new list is looked at from then on, not the one that was there when the entry was made."""
    global _numbers

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = [1, 2]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factors[0] + _numbers[0]

    module = Scaled()
    compiled = aheadgrad.compile(module, frontend="trace", fallback="error")
    run = aheadgrad.compile(lambda x: x * _numbers[0], frontend="trace", fallback="error")
    x = torch.ones(3)
    for change in (False, True):
        module.factors, _numbers = [1, 2], [1.0, 2.0]
        assert torch.equal(compiled(x), x * 2) and torch.equal(run(x), x)
        if change:
            module.factors[0], _numbers[0] = 5, 3.0
            assert torch.equal(compiled(x), x * 8) and torch.equal(run(x), x * 3)


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_a_function_of_torch_with_another_in_its_place_runs_once(
    frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relu, split = F.relu, Tensor.split
    monkeypatch.setattr(F, "relu", lambda x: relu(x) + 1)
    monkeypatch.setattr(Tensor, "split", lambda x, n: [part + 1 for part in split(x, n)])

    def f(x: Tensor) -> Tensor:
        return F.relu(x) * 2 + x.split(2)[0].sum()

    x = torch.randn(4)
    assert torch.equal(aheadgrad.compile(f, frontend=frontend, backend="eager")(x), f(x))

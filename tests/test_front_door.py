"""The default front end: functions, methods, decorators, modules, and what they report."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import aheadgrad
from aheadgrad.errors import FallbackError, FallbackWarning, InvalidOption, RecompileWarning


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Dynamo counts compilations by code, across tests."""
    torch.compiler.reset()


def wave(x: Tensor, scale: float = 2.0, *, shift: float = 0.0) -> Tensor:
    """A function with a name, a text and a signature."""
    return (x * scale).sin() + shift


@aheadgrad.compile
def decorated(x: Tensor) -> Tensor:
    return x * 3


@aheadgrad.compile(fullgraph=True)
def decorated_whole(x: Tensor) -> Tensor:
    return x * 4


class Model(nn.Module):
    """A module that people use through more than its call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layers(x) * scale + self.shift

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).pow(2).mean()

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, i: int) -> nn.Module:
        return self.layers[i]


def leaf(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()


def has_break(x: Tensor) -> Tensor:
    y = x * 2
    print(end="")  # no graph contains that
    return y + 1


# functions


def test_a_function() -> None:
    fast = aheadgrad.compile(wave)
    x, y = leaf(3), leaf(3)
    for args, kwargs in (((), {}), ((3.0,), {}), ((), {"shift": 1.0}), ((), {"scale": 0.5, "shift": 2.0})):
        expected, found = wave(x, *args, **kwargs), fast(y, *args, **kwargs)
        assert torch.equal(expected, found)
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert fast.fallbacks == {}
    assert fast.__name__ == "wave"
    assert fast.__doc__ == wave.__doc__
    assert inspect.signature(fast) == inspect.signature(wave)


def test_decorators() -> None:
    x = leaf(3)
    assert torch.equal(decorated(x), x * 3)
    assert torch.equal(decorated_whole(x), x * 4)
    assert len(decorated.entries) == len(decorated_whole.entries) == 1
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated


def test_methods() -> None:
    class Thing:
        def __init__(self, w: Tensor) -> None:
            self.w = w

        @aheadgrad.compile
        def times(self, x: Tensor) -> Tensor:
            return x * self.w

        @classmethod
        @aheadgrad.compile
        def of_class(cls, x: Tensor) -> Tensor:
            return x * len(cls.__name__)

        @staticmethod
        @aheadgrad.compile
        def alone(x: Tensor) -> Tensor:
            return x * 7

        def plain(self, x: Tensor) -> Tensor:
            return x + self.w

    one, other, x = Thing(torch.ones(3)), Thing(torch.full((3,), 2.0)), leaf(3)
    assert torch.equal(one.times(x), x)
    assert torch.equal(other.times(x), x * 2)
    other.w = torch.full((3,), 5.0)
    assert torch.equal(other.times(x), x * 5)
    assert torch.equal(Thing.of_class(x), x * 5)
    assert torch.equal(Thing.alone(x), x * 7)
    bound = aheadgrad.compile(one.plain)
    assert torch.equal(bound(x), x + 1)
    assert len(bound.entries) == 1


def test_a_whole_graph_is_asked_for() -> None:
    fast = aheadgrad.compile(has_break)
    assert torch.equal(fast(leaf(3)), leaf(3) * 2 + 1)
    assert len(fast.entries) == 2
    assert len(fast.breaks) == 1
    assert fast.fallbacks == {}  # a break is none
    whole = aheadgrad.compile(has_break, fullgraph=True)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
            whole(leaf(3))


@pytest.mark.parametrize(("dynamic", "entries"), [(True, 1), (False, 4), (None, 2)])
def test_sizes_that_change(dynamic: bool | None, entries: int) -> None:
    fast = aheadgrad.compile(lambda x: x.sin() * x.shape[0], dynamic=dynamic, fallback="error")
    for n in (2, 3, 4, 5, 3):
        assert torch.equal(fast(leaf(n)), leaf(n).sin() * n)
    assert len(fast.entries) == entries
    assert len(fast.misses) == entries - 1


# modules


def test_a_module_stays_what_it_was() -> None:
    model = Model()
    fast = aheadgrad.compile(model)
    assert torch.equal(fast(leaf(2, 3)), model(leaf(2, 3)))
    assert isinstance(fast, Model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in model.named_modules()]
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    assert len(fast) == 3
    assert fast[0] is model.layers[0]
    assert repr(fast) == repr(model)
    for result in (fast.train(), fast.eval(), fast.to(torch.float64), fast.float(), fast.requires_grad_()):
        assert result is fast
    assert not model.training
    fast.load_state_dict(model.state_dict())
    assert len(fast.entries) == 1


def test_a_module_trains() -> None:
    torch.manual_seed(0)
    eager = Model()
    other = copy.deepcopy(eager)
    fast = aheadgrad.compile(other, fallback="error")
    for module, run in ((eager, eager), (other, fast)):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(leaf(4, 3)).pow(2).sum().backward()
            optimizer.step()
        assert module.shift.grad is None
    for a, b in zip(eager.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(fast.entries) == 1


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_module(make: Any) -> None:
    fast = aheadgrad.compile(Model(), dynamic=False)
    x = leaf(2, 3)
    expected = fast(x)
    other = make(fast)
    assert other is not fast
    assert other.entries == []
    assert torch.equal(other(x), expected)
    assert len(other.entries) == 1
    assert isinstance(other, Model)
    with torch.no_grad():
        other.shift.zero_()
    torch.testing.assert_close(fast(x), expected - int(make is copy.copy))  # a shallow one shares buffers


def test_hooks_of_a_module() -> None:
    model = Model()
    fast = aheadgrad.compile(model)
    x = leaf(2, 3)
    plain = fast(x)
    handle = fast.register_forward_hook(lambda m, args, out: out * 2)
    model.register_forward_pre_hook(lambda m, args: (args[0] * 1,))
    assert torch.equal(fast(x), plain * 2)
    handle.remove()
    assert torch.equal(fast(x), plain)


def test_hooks_of_a_part_added_after_the_first_call() -> None:
    """Dynamo's own guards leave those out."""
    model = Model()
    fast = aheadgrad.compile(model)
    x = leaf(2, 3)
    plain = fast(x)
    seen: list[int] = []
    first = model.layers[0].register_forward_hook(lambda m, args, out: seen.append(1))
    second = model.layers[2].register_forward_pre_hook(lambda m, args: (args[0] * 0,))
    assert torch.equal(fast(x), model(x))
    assert seen == [1, 1]
    first.remove()
    second.remove()
    assert torch.equal(fast(x), plain)
    assert seen == [1, 1]


def test_a_method_other_than_forward() -> None:
    model = Model()
    fast = aheadgrad.compile(model, fallback="error")
    assert torch.equal(fast.training_step(leaf(4, 3)), model.training_step(leaf(4, 3)))
    assert len(fast.entries) == 1  # its self(x)
    step = aheadgrad.compile(fast.training_step)
    assert torch.equal(step(leaf(4, 3)), model.training_step(leaf(4, 3)))
    assert len(step.entries) == 1


# reports


def test_the_limit_of_entries() -> None:
    fast = aheadgrad.compile(lambda x, word: x * len(word), max_entries=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(1, 6):
            assert torch.equal(fast(leaf(3), "a" * i), leaf(3) * i)
        fast(leaf(3), "a")  # has an entry
    assert [w.category for w in told] == [RecompileWarning]
    assert told[0].filename == __file__
    assert "word == 'a'" in str(told[0].message)
    assert fast.fallbacks == {"the limit of entries is reached": 3}
    assert len(fast.entries) == 2
    never = aheadgrad.compile(lambda x, word: x * len(word), max_entries=1, fallback="error")
    never(leaf(3), "a")
    for _ in range(2):
        with pytest.raises(FallbackError, match="limit of entries"):
            never(leaf(3), "aa")


def test_reports_are_a_few_lines() -> None:
    fast = aheadgrad.compile(has_break)
    assert [str(r) for r in (fast.entries, fast.misses, fast.breaks, fast.fallbacks)] == ["none"] * 4
    assert fast.source == ""
    with aheadgrad.explain_misses() as heard:
        fast(leaf(3))
        fast(leaf(3).double())
    line = has_break.__code__.co_firstlineno + 1
    entries, breaks, misses = (str(r).splitlines() for r in (fast.entries, fast.breaks, fast.misses))
    assert len(entries) == 4
    assert f"test_front_door.py:{line}, in has_break: 1 ops forward" in entries[0]
    assert len(breaks) == 1
    assert f"test_front_door.py:{line + 1}, in has_break" in breaks[0]
    assert "print" in breaks[0]
    assert misses[:2] == [
        "has_break: no entry fits this call. Closest is entry 0:",
        "  tensor 'x' dtype mismatch. expected Float, actual Double",
    ]
    assert [str(m) for m in heard] == [str(m) for m in fast.misses]
    assert "# entry 3" in fast.source
    assert fast.explain().count("Entry") == 4 or fast.explain().count("entry") >= 4


def test_reports_of_a_module_that_has_such_names_itself() -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.entries = [1]
            self.source = nn.Linear(1, 1)

    fast = aheadgrad.compile(Own())
    fast(leaf(3))
    assert fast.entries == [1]
    assert isinstance(fast.source, nn.Linear)
    assert fast.fallbacks == {}


def test_a_call_under_a_dispatch_mode_is_counted() -> None:
    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def helper(x: Tensor) -> Tensor:
        return x + 1

    fast, strict = (aheadgrad.compile(lambda x: helper(x) * 2, fallback=f) for f in ("warn", "error"))
    x = torch.ones(2)
    with Sees():
        with pytest.warns(FallbackWarning, match="TorchDispatchMode"):
            assert torch.equal(fast(x), x * 4)
        assert torch.equal(fast(x), x * 4)
        with pytest.raises(FallbackError, match="TorchDispatchMode"):
            strict(x)
    assert list(fast.fallbacks.values()) == [2] and not fast.entries
    for run in (fast, strict):  # later calls are compiled
        assert torch.equal(run(x), x * 4) and len(run.entries) == 1


def test_an_uncompiled_graph_is_counted() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x * 2
        return x + y.shape[0]

    fast = aheadgrad.compile(fn)
    with pytest.warns(aheadgrad.errors.FallbackWarning, match=r"inference mode.*test_front_door\.py"):
        fast(leaf(3))
    assert torch.equal(fast(leaf(3)), fn(leaf(3)))
    assert not torch.is_inference_mode_enabled()
    assert list(fast.fallbacks.values()) == [2]
    assert str(fast.fallbacks).startswith("2 × inference mode is entered inside the function (")
    with pytest.raises(FallbackError, match="inference mode"):
        aheadgrad.compile(fn, fallback="error")(leaf(3))
    assert not torch.is_inference_mode_enabled()


# bad input


@pytest.mark.parametrize(
    "options",
    [
        {"frontend": "no"}, {"frontend": None}, {"fullgraph": "yes"}, {"fullgraph": 1}, {"dynamic": 1},
        {"dynamic": "auto"}, {"backend": "no"}, {"fallback": "no"}, {"max_entries": 0}, {"max_entries": True},
        {"max_entries": "2"}, {"partition": "no"}, {"decompositions": 3}, {"any_order": "no"},
        {"backward_autocast": "no"},
    ],
)  # fmt: skip
def test_nonsense_options(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidOption, match=name):
        aheadgrad.compile(wave, **options)


@pytest.mark.parametrize("thing", [3, "wave", torch.ones(3), [wave]])
def test_what_is_no_function(thing: Any) -> None:
    with pytest.raises(InvalidOption, match=type(thing).__name__):
        aheadgrad.compile(thing)
    with pytest.raises(InvalidOption, match=type(thing).__name__):
        aheadgrad.compile(fullgraph=True)(thing)

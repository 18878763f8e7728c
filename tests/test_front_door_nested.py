"""The default front end inside other things: compiled code, transforms, modes, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import aheadgrad


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


def wave(x: Tensor, scale: float = 2.0) -> Tensor:
    return (x * scale).sin()


def leaf(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()


@pytest.mark.parametrize("inner", ["dynamo", "trace"])
@pytest.mark.parametrize("outer", ["dynamo", "trace", "torch.compile"])
@pytest.mark.parametrize("called_before", [False, True])
def test_compiled_inside_compiled(inner: str, outer: str, called_before: bool) -> None:
    """One graph, of the outer one: the inner one is a part of it."""
    fast: Any = aheadgrad.compile(wave, frontend=inner)
    if called_before:
        fast(leaf(3))

    def fn(x: Tensor) -> Tensor:
        return fast(x) + 1

    if outer == "torch.compile":
        both = torch.compile(fn, backend="eager", fullgraph=True)
    else:
        both = aheadgrad.compile(fn, frontend=outer, fullgraph=True, fallback="error")
    for _ in range(2):
        x, y = leaf(3), leaf(3)
        expected, found = wave(x) + 1, both(y)
        assert torch.equal(expected, found)
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert len(fast.entries) == int(called_before)
    if outer != "torch.compile":
        assert len(both.entries) == 1


@pytest.mark.parametrize("inner", ["dynamo", "trace"])
@pytest.mark.parametrize("outer", ["dynamo", "trace", "torch.compile"])
def test_a_compiled_module_inside_compiled(inner: str, outer: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    fast = aheadgrad.compile(layer, frontend=inner)
    model = nn.Sequential(fast, nn.Tanh())
    if outer == "torch.compile":
        both = torch.compile(model, backend="eager", fullgraph=True)
    else:
        both = aheadgrad.compile(model, frontend=outer, fullgraph=True, fallback="error")
    for _ in range(2):
        assert torch.equal(both(leaf(2, 3)), layer(leaf(2, 3)).tanh())
    both(leaf(2, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert fast.entries == []


def test_transforms_around_it() -> None:
    """They want to see the function's own ops, and do."""
    fast = aheadgrad.compile(wave, fallback="error")
    x = leaf(4, 3).detach()
    transforms: list[Any] = [
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.grad(lambda t: f(t).sum())(x),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t).sum()))(x),
        lambda f: torch.func.jacrev(f)(x[0]),
    ]
    for transform in transforms:
        assert torch.equal(transform(fast), transform(wave))
    assert fast.entries == []
    assert torch.equal(fast(x), wave(x))
    assert len(fast.entries) == 1


def test_transforms_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.func.vmap(wave)(x) + torch.func.grad(lambda t: wave(t).sum())(x)

    fast = aheadgrad.compile(fn, fullgraph=True, fallback="error")
    x = leaf(4, 3).detach()
    for _ in range(2):
        assert torch.equal(fast(x), fn(x))
    assert len(fast.entries) == 1


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
@pytest.mark.parametrize("mode", [Seen, Dispatched])
def test_modes_see_what_they_see_in_eager(mode: Any) -> None:
    fast = aheadgrad.compile(wave)
    with mode() as eager:
        expected = wave(leaf(3))
    for _ in range(2):
        with mode() as ours:
            found = fast(leaf(3))
        assert torch.equal(expected, found)
        assert ours.names == eager.names
    assert torch.equal(fast(leaf(3)), expected)


def test_surroundings() -> None:
    def fn(x: Tensor) -> Tensor:
        return x @ x

    fast = aheadgrad.compile(fn, fallback="error")
    for _ in range(2):
        with torch.no_grad():
            assert not fast(leaf(3, 3)).requires_grad
        with torch.inference_mode():
            assert fast(leaf(3, 3)).is_inference()
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = fast(leaf(3, 3)), fn(leaf(3, 3))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        assert fast(leaf(3, 3)).dtype == torch.float32
        assert fast(leaf(3, 3)).requires_grad
    assert len(fast.entries) == 4


def test_threads() -> None:
    fast = aheadgrad.compile(wave, max_entries=32, dynamic=False)
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(6):
                x, y = leaf(n + i % 3), leaf(n + i % 3)
                wave(x).sum().backward()
                fast(y).sum().backward()
                assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3, 4, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert fast.fallbacks == {}
    assert 5 <= len(fast.entries) <= 10  # two threads may meet a new size at once


def test_an_error_in_one_thread_says_nothing_about_another() -> None:
    fast = aheadgrad.compile(lambda x: x @ torch.ones(3), fallback="error")
    raised: list[type] = []

    def work() -> None:
        for _ in range(4):
            try:
                fast(torch.ones(2))
            except RuntimeError as error:
                raised.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(4):
        assert fast(torch.ones(3)) == 3
    thread.join()
    assert raised == [RuntimeError] * 4
    assert fast.fallbacks == {}


def test_a_function_that_calls_itself() -> None:
    @aheadgrad.compile(fallback="error")
    def power(x: Tensor, n: int) -> Tensor:
        return x if n == 0 else x * power(x, n - 1)

    assert torch.equal(power(leaf(3), 3), leaf(3) * (leaf(3) * (leaf(3) * leaf(3))))


def test_a_module_that_torch_has_compiled() -> None:
    model = nn.Linear(2, 2)
    x = leaf(3, 2)
    fast = aheadgrad.compile(torch.compile(model, backend="eager"))
    assert torch.equal(fast(x), model(x))

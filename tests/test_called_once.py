"""The user's function is called exactly once per compile, and not at all afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad


class Counter:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fn(*args, **kwargs)


def x() -> Tensor:
    return torch.arange(4.0).view(2, 2).requires_grad_()


def plain() -> Tensor:
    return torch.arange(4.0).view(2, 2)


def shared() -> tuple[Tensor, Tensor]:
    base = torch.arange(6.0)
    return base[:4], base[2:]


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "plain": (lambda a: a.sin() * 2, lambda: (plain(),)),
    "graded": (lambda a: a.sin() * 2, lambda: (x(),)),
    "two outputs": (lambda a, b: (a * b, a.exp()), lambda: (x(), x())),
    "changes its input": (lambda a: a.add_(1), lambda: (plain(),)),
    "changes a non-leaf": (lambda a: a.add_(1) * 2, lambda: (x() * 1,)),
    "changes the shape": (lambda a: a.t_(), lambda: (plain(),)),
    "returns its input": (lambda a: a, lambda: (x(),)),
    "returns views": (lambda a: (a.view(-1), a[0], (a * 2).view(-1)), lambda: (x(),)),
    "the same twice": (lambda a, b: a.mul_(2) + b, lambda: (lambda t: (t, t))(plain())),
    "random": (lambda a: torch.dropout(a, 0.5, True), lambda: (x(),)),
    "grad mode": (lambda a: (torch.set_grad_enabled(True), a * 2)[1], lambda: (x(),)),
    "inner gradient": (
        lambda a: torch.autograd.grad((a * a).sum(), a, create_graph=True)[0],
        lambda: (x(),),
    ),
    "no outputs": (lambda a: None, lambda: (x(),)),
}


@pytest.mark.parametrize("name", CASES)
def test_functions(name: str) -> None:
    fn, make = CASES[name]
    counter = Counter(fn)
    compiled = aheadgrad.compile(counter, fallback="error", frontend="trace")
    for _ in range(3):
        out = compiled(*make())
        parts = out if isinstance(out, tuple) else (out,)
        graded = [p for p in parts if isinstance(p, Tensor) and p.requires_grad]
        if graded:
            sum(p.sum() for p in graded).backward()  # type: ignore[union-attr]
        assert counter.calls == 1
    assert len(compiled.entries) == 1


def test_inputs_that_share_memory_and_are_changed() -> None:
    counter = Counter(lambda a, b: a.add_(1) * b)
    compiled = aheadgrad.compile(counter, fallback="error", frontend="trace")
    for _ in range(2):
        compiled(*shared())
    assert counter.calls == 1


def test_once_for_each_kind_of_call() -> None:
    for dynamic, calls in ((False, 3), (None, 2), (True, 1)):
        counter = Counter(lambda a: a * 2)
        compiled = aheadgrad.compile(counter, fallback="error", dynamic=dynamic, frontend="trace")
        for size in (2, 3, 2, 3, 4):
            compiled(torch.ones(size))
        assert counter.calls == calls


def test_modules() -> None:
    calls = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

        def forward(self, a: Tensor) -> Tensor:
            calls.append(1)
            return self.body(a).sin()

    model = Net()
    compiled = aheadgrad.compile(model, fallback="error", frontend="trace")
    for _ in range(3):
        compiled(x()).sum().backward()
    assert len(calls) == 1
    model.eval()
    for _ in range(2):
        compiled(x()).sum().backward()
    assert len(calls) == 2


def test_a_new_pattern_of_tangents_does_not_call_again() -> None:
    counter = Counter(lambda a: (a * 2, a.exp(), a.sin()))
    compiled = aheadgrad.compile(counter, fallback="error", frontend="trace")
    for i in range(3):
        compiled(x())[i].sum().backward()
    first, second, _ = compiled(x())
    first.backward(torch.ones(1).expand(2, 2), retain_graph=True)
    second.backward(torch.ones(2, 2).t())
    assert counter.calls == 1


def test_capture_calls_once() -> None:
    counter = Counter(lambda a: a.sin().add_(1))
    captured = aheadgrad.capture(counter, x())
    str(captured)
    captured.explain()
    assert counter.calls == 1


def test_custom_functions() -> None:
    calls = {"forward": 0, "backward": 0}

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            calls["forward"] += 1
            return a * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            calls["backward"] += 1
            return g * 2

    compiled = aheadgrad.compile(lambda a: Double.apply(a), fallback="error", frontend="trace")
    for _ in range(3):
        compiled(x()).sum().backward()
    assert calls == {"forward": 1, "backward": 1}


def test_an_error_calls_once() -> None:
    def fn(a: Tensor) -> Tensor:
        raise ValueError("mine")

    counter = Counter(fn)
    with pytest.raises(ValueError, match="mine"):
        aheadgrad.compile(counter, fallback="error", frontend="trace")(x())
    assert counter.calls == 1

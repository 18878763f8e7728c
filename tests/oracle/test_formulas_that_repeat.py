"""Formulas of higher orders compute again what a lower one has saved: they must, where eager does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "log of sin": lambda x: x.sin().log(),
    "log of abs": lambda x: x.abs().log(),
    "quotient": lambda x: x.exp() / x,
    "logaddexp": lambda x: torch.logaddexp(x, x.sin()),
    "root of abs": lambda x: x.abs().sqrt(),
    "by its norm": lambda x: x / x.norm(),
    "root": lambda x: x.sqrt(),
    "log": lambda x: x.log(),
}


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return aheadgrad.compile(fn, frontend="trace", backend="eager", fallback="error")


def _outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except RuntimeError as error:
        return type(error)


def _same(fn: Callable[[Callable[..., Any]], Any], function: Callable[..., Any]) -> None:
    expected, got = (_outcome(lambda f=f: fn(f)) for f in (function, _compiled(function)))  # type: ignore[misc]
    assert isinstance(expected, Tensor) == isinstance(got, Tensor), (expected, got)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)
    else:
        assert expected is got


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("after", [lambda o: o, torch.abs, torch.relu], ids=["", "abs", "relu"])
def test_derivatives_to_the_fourth(name: str, after: Callable[[Tensor], Tensor]) -> None:
    def play(fn: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.linspace(0.3, 1.4, 5, dtype=torch.float64, requires_grad=True)
        found = after(fn(x))
        for _ in range(4):
            if not found.requires_grad:
                break
            (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return found.detach()

    _same(play, FUNCTIONS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_tangent_is_changed(name: str, before: int) -> None:
    def play(fn: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.linspace(0.3, 1.4, 5, dtype=torch.float64, requires_grad=True)
        tangent = torch.linspace(-1, 1, 5, dtype=torch.float64)
        (found,) = torch.autograd.grad(fn(x), x, tangent, create_graph=True)
        for k in range(1, 4):
            if k == before:
                tangent.mul_(2)
            (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return found.detach()

    _same(play, FUNCTIONS[name])


@pytest.mark.parametrize("hidden", [False, True])
def test_an_intermediate_is_changed(hidden: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y * y, y.detach()

    def play(fn: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        x = torch.linspace(0.3, 1.4, 5, dtype=torch.float64, requires_grad=True)
        out, seen = fn(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (seen.data if hidden else seen).mul_(3)
        return torch.autograd.grad(first.sum(), x)[0]

    _same(play, fn)

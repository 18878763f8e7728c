"""A backward frees what was saved as it goes: the most memory that it needs is what eager needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad
from aheadgrad.backends.eager import compile_eager
from aheadgrad.testing.peak import peak_of_backward
from aheadgrad.torchlayer.autograd import gives_tangents_away

from .common import assert_equal, leaf, strict

LIMIT = 1.05
SIZE = 64
LAYERS = 12


def deep(x: Tensor, *weights: Tensor) -> Tensor:
    """Each layer saves as much as its gradient weighs."""
    for w in weights:
        x = (x @ w).tanh()
    return x.square().mean()


def plain() -> tuple[Tensor, ...]:
    return tuple(leaf(SIZE, SIZE, seed=i) for i in range(LAYERS + 1))


def by_call(request: Any) -> Any:
    """A backend without lines of its own to offer."""
    made = compile_eager(request)
    return lambda args: made.call(args)


WAYS: dict[str, Callable[[Any], Any]] = {
    "trace": strict,
    "dynamo": aheadgrad.compile,
    "torch.compile": lambda fn: torch.compile(fn, backend="aheadgrad"),
    "any size": lambda fn: strict(fn, dynamic=True),
    "backend without lines": lambda fn: strict(fn, backend=by_call),
    "first order only": lambda fn: strict(fn, any_order=False),
}


def ratio(fn: Any, compiled: Any, make: Callable[[], tuple[Any, ...]], **how: Any) -> float:
    for _ in range(2):
        args = make()
        how.get("backward", Tensor.backward)(compiled(*args))
    peaks = []
    for run in (fn, compiled):
        args = make()
        peaks.append(peak_of_backward(lambda: run(*args), **how))
    return peaks[1] / peaks[0]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_deep_function(way: Callable[[Any], Any]) -> None:
    torch.compiler.reset()
    assert ratio(deep, way(deep), plain) <= LIMIT


@pytest.mark.parametrize("way", ["trace", "dynamo"])
def test_a_deep_module(way: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    compiled = WAYS[way](model)

    def make() -> tuple[Tensor]:
        model.zero_grad()
        return (leaf(SIZE, SIZE, grad=False),)

    assert ratio(model, compiled, make, backward=lambda out: out.sum().backward()) <= LIMIT


def test_a_pattern_that_comes_later() -> None:
    """With one of two tangents, and one that is laid out in its own way."""

    def two(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        for w in weights:
            x = (x @ w).tanh()
        return x.sin(), x.exp()

    def backward(outs: Any) -> None:
        outs[1].backward(torch.ones(SIZE, SIZE).t())

    assert ratio(two, strict(two), plain, backward=backward) <= LIMIT
    assert ratio(two, strict(two, dynamic=True), plain, backward=backward) <= LIMIT


@pytest.mark.skipif(not gives_tangents_away, reason="this torch holds tangents while a backward runs")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("wanted", [slice(None), slice(1, None)], ids=["all", "some"])
def test_tangents_are_freed_after_their_last_use(way: Callable[[Any], Any], wanted: slice) -> None:
    def wide(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).tanh() * 2.0).tanh()

    def make() -> tuple[Tensor, ...]:
        given[:] = leaf(8, 8, seed=0), leaf(8, 64 * SIZE, seed=1)
        return tuple(given)

    given: list[Tensor] = []
    torch.compiler.reset()
    backward = lambda out: (out * 2).sum().backward(inputs=given[wanted])  # noqa: E731
    assert ratio(wide, way(wide), make, backward=backward) <= LIMIT


def test_a_tensor_subclass() -> None:
    def pairs() -> tuple[Any, ...]:
        halves = [leaf(SIZE, SIZE, seed=i, grad=False) for i in range(2 * LAYERS + 2)]
        return tuple(TwoTensor(a, b).requires_grad_() for a, b in zip(halves[::2], halves[1::2], strict=True))

    for options in ({}, {"backend": by_call}):
        assert ratio(deep, strict(deep, **options), pairs) <= LIMIT


@pytest.mark.parametrize("way", ["trace", "dynamo", "any size", "backend without lines"])
def test_a_graph_that_is_kept_stays(way: str) -> None:
    torch.compiler.reset()
    compiled = WAYS[way](deep)
    given = plain()
    out, expected = compiled(*given), deep(*given)
    for _ in range(3):
        again = torch.autograd.grad(out, given, retain_graph=True)
        assert_equal(again, torch.autograd.grad(expected, given, retain_graph=True))
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()

"""Derivatives of any order where sizes change: with symbols where they will do, with numbers where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aheadgrad
from tests.oracle.common import leaf, strict

Function = Callable[[Tensor], Tensor]
WEIGHT = leaf(3, 4, 3, dtype=torch.float64, grad=False)

FUNCTIONS: dict[str, Function] = {
    "mean": lambda x: (x**2).mean(0),
    "variance": lambda x: x.var(0),
    "standard deviation": lambda x: x.std(0),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "layer norm over the size": lambda x: F.layer_norm(x.t(), (x.shape[0],)),
    "product": lambda x: x.prod(0),
    "convolution": lambda x: F.conv1d(x.t()[None], WEIGHT, padding=1),
    "squared error": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "smooth error": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "adaptive pooling": lambda x: F.adaptive_avg_pool1d(x.t()[None], 1),
    "gate": lambda x: F.glu(x, 1),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: x.norm(dim=0),
    "joined": lambda x: torch.cat([x, x * 2]).mean(0),
    "divided by a size": lambda x: x.sum(0) / x.shape[0] * x,
    "strided view": lambda x: x.view(-1)[::2].cos().mean(),
    "perceptron": lambda x: torch.tanh(x @ x.t()),
}


def derivative(f: Function, x: Tensor, order: int) -> Tensor:
    y = f(x)
    for _ in range(order):
        (y,) = torch.autograd.grad((y * y.detach().cos() + y**3).sum(), x, create_graph=True)
    return y


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_change(name: str, dynamic: bool | None) -> None:
    function = FUNCTIONS[name]
    compiled = strict(function, dynamic=dynamic)
    for n in (8, 5, 3, 8):
        for order in (2, 3):
            x = leaf(n, 4, seed=n, dtype=torch.float64)
            given = derivative(function, x, order)
            torch.testing.assert_close(derivative(compiled, x, order), given)


def test_one_entry_serves_all_sizes() -> None:
    compiled = strict(FUNCTIONS["batch norm"], dynamic=True)
    for n in (8, 5, 7, 3):
        derivative(compiled, leaf(n, 4, dtype=torch.float64), 2)
    assert len(compiled.entries) == 1


def test_a_pattern_of_tangents_that_takes_different_ways() -> None:
    """A custom backward that looks at a size, first asked for one output alone."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return g * (2 if g.numel() % 8 == 0 else 5)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = Odd.apply(x)
        return y * 2, y.sin()

    compiled = aheadgrad.compile(f, dynamic=True, frontend="trace")
    for n in (4, 3, 8, 5, 2):
        for k in (0, 1):
            x = leaf(n, 4, seed=n)
            (given,) = torch.autograd.grad(f(x)[k].sum(), x)
            (got,) = torch.autograd.grad(compiled(x)[k].sum(), x)
            torch.testing.assert_close(got, given)

"""Custom autograd functions in higher derivatives: they follow their own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .plays import agree, double, grad


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_once_differentiable_raises_in_the_second_backward() -> None:
    def play(run: Any) -> Any:
        x = double(3)
        (g,) = grad(run(x), x)
        g.sum().backward()

    agree(lambda x: Once.apply(x).exp() + x**3, refused=[play])


class SavedByHand(torch.autograd.Function):
    """An intermediate returned as an output, the documented way to save it for double backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        e, n = x.exp(), (-x).exp()
        ctx.save_for_backward(e, n)
        return (e - n) / 2, e, n

    @staticmethod
    def backward(ctx: Any, g: Tensor, ge: Tensor, gn: Tensor) -> Tensor:
        e, n = ctx.saved_tensors
        return g * (e + n) / 2 + ge * e - gn * n


class WrongOnPurpose(torch.autograd.Function):
    """Its gradient is not its derivative; every order must follow what it says, not what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sin()


class GradWithoutHistory(torch.autograd.Function):
    """Its backward leaves autograd on purpose: the second derivative misses that part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x.detach() ** 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: SavedByHand.apply(x)[0] * x,
        lambda x: WrongOnPurpose.apply(x * 2).sum() * x,
        lambda x: GradWithoutHistory.apply(x) + x.sin(),
    ],
)
def test_custom_functions_follow_their_own_rules(fn: Callable[[Tensor], Tensor]) -> None:
    def play(run: Any) -> Any:
        x = double(3)
        (g,) = grad(run(x), x)
        (second,) = grad(g, x)
        return g, second, grad(second, x, allow_unused=True)

    agree(fn, play)

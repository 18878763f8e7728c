"""Custom backwards that are not linear in their tangents: what comes from several sides is added up first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.5, 0.5)


class Squared(torch.autograd.Function):
    """With a saved tensor, and a gradient that is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * g * w, torch.tanh(g) * x


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Tensor:
        (x,) = ctx.saved_tensors
        a = x * 0 if g is None else (g * x.cos()).clamp(max=0.4)
        return a if h is None else a - h.abs() * x.sin()


def _two(x: Tensor, w: Tensor) -> Tensor:
    a, b = Two.apply(x * w)
    return a * b + a * x


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clipped": lambda x, w: Clipped.apply(x) * x * w,
    "clipped inside": lambda x, w: Clipped.apply((x * w).sin()) * x,
    "clipped twice": lambda x, w: Clipped.apply(Clipped.apply(x * w).sin()) * x.cos(),
    "squared": lambda x, w: Squared.apply(x.sin(), w) * x,
    "squared and clipped": lambda x, w: Squared.apply(Clipped.apply(x), w * x).tanh() * x,
    "two": _two,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("also", [True, False])
@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_a_function_and_its_gradients_in_one_loss(name: str, order: int, also: bool, frontend: str) -> None:
    fn = FUNCTIONS[name]
    found = []
    for f in (fn, aheadgrad.compile(fn, frontend=frontend, backend="eager")):
        for _ in range(2):
            x = torch.linspace(0.3, 1.4, 4, dtype=torch.float64, requires_grad=True)
            w = torch.linspace(-1.2, 0.7, 4, dtype=torch.float64, requires_grad=True)
            out = f(x, w)
            loss, g = out.sum() if also else 0.0, out
            for _ in range(order):
                (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
                loss = loss + (g * g).sum()
            loss.backward()
        found.append((x.grad, w.grad))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)

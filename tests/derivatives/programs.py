"""Views, writes in place, custom functions, transforms inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from .cases import a, b, fixed, function, pos

# views and in-place programs


def writes_into_views(x: Tensor, y: Tensor) -> Any:
    h = x * 2
    h[0].mul_(y)
    h.t()[1].sin_()
    h.view(-1)[::2].add_(y.sum())
    return h, h[1:] * y


def writes_into_an_argument(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    overwrite(x, y)
    return x * y


def overwrite(x: Tensor, y: Tensor) -> None:
    x.mul_(y)
    x[0] = y[0].exp()
    x[1:].tanh_()


def views_out(x: Tensor) -> Any:
    h = x.sin()
    return h.t(), h[0], h.view(-1)[1:], x.view(-1), h.unbind(0)[1]


def several_parts(x: Tensor, y: Tensor) -> Any:
    return x * y, y.sin(), torch.ones(2, dtype=x.dtype), x[0] ** 3


function("writes into views", writes_into_views, a(2, 2), b(2))
function("writes into a copied argument", writes_into_an_argument, a(3), b(3))
function("views out", views_out, a(2, 2))
function("several parts", several_parts, a(3), b(3))
function(
    "expand, permute, cat, stack, split",
    lambda x: torch.stack(torch.cat([x.expand(2, 3), x.permute(1, 0).expand(3, 3)]).split(1)[:3]) ** 2,
    a(1, 3),
)
function("roll, flip, repeat, tile", lambda x: (x.roll(1, 0).repeat(2) * x.flip(0).tile(2)).prod(), pos(2))
function("as_strided", lambda x: x.as_strided((2, 2), (1, 1)).prod(1), a(3))
function("no_grad region", lambda x: x * _frozen(x), lambda: fixed(0.3, 1.2).requires_grad_())
function(
    "checkpoint inside", lambda x: checkpoint(lambda t: (t.sin() * t).exp(), x, use_reentrant=False) * x, a(3)
)
function(
    "gradient inside",
    lambda x, y: torch.autograd.grad((x**3 * y).sum(), x, create_graph=True)[0] * y,
    a(3),
    b(3),
)


def _frozen(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ones_like(x) * 2


# custom functions


class Cube(torch.autograd.Function):
    """Differentiable as often as wanted: the backward is made of differentiable operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class ExpBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, result: Tensor) -> Tensor:
        ctx.save_for_backward(grad, result)
        return grad * result

    @staticmethod
    def backward(ctx: Any, ggrad: Tensor) -> Any:
        grad, result = ctx.saved_tensors
        return ggrad * result, ggrad * grad


class Exp(torch.autograd.Function):
    """Saves its own output, and its backward is a custom function again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return ExpBackward.apply(grad, result)


class ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: float) -> Tensor:
        return x * y * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.scale = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * ctx.scale, grad * x * ctx.scale, None


function("custom function", lambda x: Cube.apply(x) * x, a(3))
function("custom function with a custom backward", lambda x: Exp.apply(x * 2).sin(), a(3))
function("custom function with setup_context", lambda x, y: ScaledProduct.apply(x, y, 0.5) * x, a(3), b(3))


# transforms inside

function("vmap inside", lambda x, y: vmap(lambda t: (t * y).sin().sum())(x), a(2, 3), b(3))
function("grad inside, torch.func", lambda x: grad(lambda t: (t.sin() * t).sum())(x) * x, a(3))
function("vmap of grad inside", lambda x, y: vmap(grad(lambda t: (t * y).exp().sum()))(x), a(2, 2), b(2))
function("jvp inside", lambda x, y: jvp(lambda t: t.sin() * t, (x,), (y,)), a(3), b(3))
function("vjp inside", lambda x, y: vjp(lambda t: t.sin() * t, x)[1](y)[0], a(3), b(3))
LINEAR = nn.Linear(3, 2, bias=False, dtype=torch.float64)
function(
    "functional_call inside",
    lambda x, w: functional_call(LINEAR, {"weight": w}, (x,)).tanh(),
    a(2, 3),
    b(2, 3),
)

"""Custom autograd functions under Dynamo: every order as in eager, though its graphs know only the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import aheadgrad


class Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class SavedResult(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return g * y


class SavedInBetween(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        m = 3 * x**2
        ctx.save_for_backward(m)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (m,) = ctx.saved_tensors  # has no history: not the derivative
        return g * m


class Attributes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Any:
        ctx.k, ctx.shape, ctx.held = k, x.shape, {"x": x, "list": [x, 3]}
        return (x**k).view(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.held["x"]
        return ctx.k * g.reshape(ctx.shape) * x ** (ctx.k - 1) * (ctx.held["list"][1] / 3), None


class Optional(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
        ctx.save_for_backward(x, w, b)
        return x * w if b is None else x * w + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b = ctx.saved_tensors
        gx = g * w if ctx.needs_input_grad[0] else None
        gw = g * x if ctx.needs_input_grad[1] else None
        return gx, gw, None if b is None else g * 1


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class Two(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3, x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * g * x**2 + h * x.cos()


class TwoOrNone(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x**3, x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor | None) -> Any:
        (x,) = ctx.saved_tensors
        return 21 * g * x**2 if h is None else 3 * g * x**2 + h * x.cos()  # other rules for one alone


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * x


class NotDifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        i = x * 2
        ctx.mark_non_differentiable(i)
        ctx.save_for_backward(x, i)
        return x**3, i

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, i = ctx.saved_tensors
        return 3 * g * x**2 + i * 0


class NoTensorAmongResults(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return 5, x**3

    @staticmethod
    def backward(ctx: Any, _: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class Sine(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * Cosine.apply(x)


class Cosine(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return -2 * g * Sine.apply(x)  # by its own rules


class WithoutHistoryInside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            s = x.sin()
        return g * 3 * x**2 * s


class AsksForGradMode(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return (2 if torch.is_grad_enabled() else 1) * g * x


class WithAFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Any) -> Any:
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x) ** 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * g * ctx.fn(x) ** 2 * x.cos(), None


class Power:
    def __init__(self) -> None:
        self.k = 3


POWER = Power()


class WithAnObject(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: Power) -> Any:
        ctx.power = power
        ctx.save_for_backward(x)
        return x**power.k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * ctx.power.k * x ** (ctx.power.k - 1), None


class SetUp(Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 3 * g * y / x


def broken(x: Tensor) -> Tensor:
    y = Cube.apply(x)
    torch._dynamo.graph_break()
    return SavedResult.apply(y) * x


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cube": lambda x: Cube.apply(x).sin(),
    "saved result": lambda x: SavedResult.apply(x).sin(),
    "saved in between": lambda x: SavedInBetween.apply(x).sin(),
    "attributes": lambda x: Attributes.apply(x, 3).sin(),
    "needs all": lambda x: Optional.apply(x, x.sin(), x * 2).sin(),
    "needs some": lambda x: Optional.apply(x, x.detach() * 2, x * 2).sin(),
    "optional is none": lambda x: Optional.apply(x, x.sin(), None).sin(),
    "optional": lambda x: Optional.apply(x, x.sin()).sin(),
    "two": lambda x: Two.apply(x)[0].sin() + Two.apply(x)[1].cos(),
    "one of two": lambda x: Two.apply(x)[1].sin(),
    "not materialized": lambda x: TwoOrNone.apply(x)[0].sin(),
    "both there": lambda x: torch.stack(TwoOrNone.apply(x)).sin(),
    "dirty": lambda x: Dirty.apply(x * 1.5).sin(),
    "not differentiable": lambda x: torch.stack(NotDifferentiable.apply(x)).sin(),
    "no tensor": lambda x: NoTensorAmongResults.apply(x)[1].sin(),
    "nested": lambda x: Sine.apply(x).sin(),
    "no_grad inside": lambda x: WithoutHistoryInside.apply(x).sin(),
    "grad mode": lambda x: AsksForGradMode.apply(x).sin(),
    "function": lambda x: WithAFunction.apply(x, torch.sin).sin(),
    "lambda": lambda x: WithAFunction.apply(x, lambda t: t.sin()).sin(),
    "object": lambda x: WithAnObject.apply(x, POWER).sin(),
    "setup_context": lambda x: SetUp.apply(x).sin(),
    "chain": lambda x: Cube.apply(SavedResult.apply(x) * x).sin(),
    "graph break": broken,
}


def orders(fn: Callable[[Tensor], Tensor], *, again: int = 3) -> list[Tensor]:
    x = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    found = [fn(x), *torch.autograd.grad(fn(x).sum(), x)]
    last = found[0]
    for _ in range(again):
        (last,) = torch.autograd.grad(last.sum(), x, create_graph=True)
        found.append(last)
    return found


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, None) for name in PROGRAMS), ("attributes", True), ("needs some", True)]
)
def test_every_order_follows_what_was_written(name: str, dynamic: bool | None) -> None:
    torch.compiler.reset()
    fn = PROGRAMS[name]
    fast = aheadgrad.compile(fn, frontend="dynamo", backend="eager", fallback="error", dynamic=dynamic)
    torch.testing.assert_close(orders(fast), orders(fn))


def test_once_differentiable_is_so() -> None:
    def fn(x: Tensor) -> Tensor:
        return Once.apply(x).sin() + x**2

    for run in (fn, aheadgrad.compile(fn, frontend="dynamo", fallback="error")):
        x = torch.ones(3, requires_grad=True)
        (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()


def test_a_saved_tensor_changed_before_the_second_backward() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return Optional.apply(x, w)

    for run in (fn, aheadgrad.compile(fn, frontend="dynamo", fallback="error")):
        x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 2
        out = run(x, w)
        w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), x, create_graph=True)


def test_a_graph_of_dynamos_alone_has_first_derivatives_only() -> None:
    """In the hands of `torch.compile` nobody notes what was written; derivatives of it are refused."""
    x = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(
        torch.compile(PROGRAMS["cube"], backend="aheadgrad")(x).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"aheadgrad\.compile knows what was written"):
        g.sum().backward()

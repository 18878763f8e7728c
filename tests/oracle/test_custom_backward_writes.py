"""A custom backward that changes in place what its forward kept, or the gradient that it is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.errors import FallbackError
from tests.oracle.common import assert_equal, default, strict

Apply = Callable[..., Any]


def _keeps_and_changes(how: str, change: Callable[[Tensor, Tensor], Any]) -> Apply:
    """A custom function that keeps a tensor in one way, and changes it in its backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Any:
            x = a.detach() + 1
            if how == "saved":
                ctx.save_for_backward(x)
            elif how == "input":
                ctx.save_for_backward(a)
            elif how == "attribute":
                ctx.kept = x
            elif how == "nested":
                ctx.kept = {"all": [x]}
            elif how == "part":
                ctx.kept = x[:1]
            elif how == "output":
                x = a * 2
                ctx.save_for_backward(x)
                return x
            return a * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            kept = getattr(ctx, "kept", None)
            kept = kept["all"][0] if how == "nested" else kept
            x = ctx.saved_tensors[0] if kept is None else kept
            change(x, grad)
            return grad * x

    return Function.apply


_CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda x, g: x.mul_(4),
    "foreach": lambda x, g: torch._foreach_mul_([x], 4),
    "slice": lambda x, g: x[:1].mul_(4),
    "item": lambda x, g: x.__setitem__(0, 7.0),
    "out": lambda x, g: torch.mul(x, 4, out=x),
    "by the gradient": lambda x, g: x.add_(g[:1]),
}


def _backward_again(fn: Apply, first: Tensor) -> list[Any]:
    """Backwards with tangents of two layouts, as long as they do not raise; with what is seen outside."""
    a = torch.ones(2, requires_grad=True)
    b = a * 1
    y = fn(b)
    found: list[Any] = []
    for weight in (first, torch.tensor([1.0, 2.0]), torch.ones(()).expand(2)):
        a.grad = None
        try:
            y.backward(weight, retain_graph=True)
        except RuntimeError as error:
            return [*found, type(error)]
        found += [a.grad, b.detach().clone(), y.detach().clone()]
    return found


@pytest.mark.parametrize("front_end", [strict, default])
@pytest.mark.parametrize(
    "first", [torch.tensor([1.0, 3.0]), torch.ones(()).expand(2)], ids=["own", "expanded"]
)
@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
@pytest.mark.parametrize("how", ["saved", "input"])
def test_a_backward_that_changes_what_it_saved(
    how: str, change: Callable[[Tensor, Tensor], Any], first: Tensor, front_end: Apply
) -> None:
    fn = _keeps_and_changes(how, change)
    compiled = front_end(fn)
    for _ in range(2):
        assert_equal(_backward_again(fn, first), _backward_again(compiled, first))


@pytest.mark.parametrize("front_end", ["trace", "dynamo"])
@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
@pytest.mark.parametrize("how", ["attribute", "nested", "part", "output"])
def test_other_changes_in_a_backward_are_left_to_eager(
    how: str, change: Callable[[Tensor, Tensor], Any], front_end: str
) -> None:
    fn, first = _keeps_and_changes(how, change), torch.ones(2)
    with pytest.raises(FallbackError, match="backward changes"):
        _backward_again(aheadgrad.compile(fn, frontend=front_end, fallback="error"), first)
    compiled = aheadgrad.compile(fn, frontend=front_end)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(_backward_again(fn, first), _backward_again(compiled, first))
    assert compiled.fallbacks


class _ChangesTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad[:1].mul_(5)
        return grad * b, grad.mul_(2) * a


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("front_end", ["trace", "dynamo"])
def test_a_backward_that_changes_the_gradient_it_is_given(front_end: str, dynamic: bool) -> None:
    """Whoever gave the gradient sees that; what autograd adds up does not suffer from it."""

    def outcome(run: Apply) -> list[Any]:
        a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
        found: list[Any] = []
        for tangent in (torch.tensor([1.0, 3.0]), torch.arange(4.0)[::2], torch.tensor([2.0, 5.0])):
            out = run(a, b)
            out.backward(tangent, retain_graph=True)
            out.backward(tangent)
            found += [a.grad.clone(), b.grad.clone(), tangent]  # type: ignore[union-attr]
        (run(a * 2, b) * 3 + a).sum().backward()
        with pytest.raises(RuntimeError, match="single memory location"):
            run(a, b).sum().backward()
        return [*found, a.grad, b.grad]

    fn = _ChangesTheGradient.apply
    compiled = aheadgrad.compile(fn, frontend=front_end, dynamic=dynamic, fallback="error")
    assert_equal(outcome(fn), outcome(compiled))


class _SavesMuch(torch.autograd.Function):
    """An input, an intermediate and an output, of which the backward changes the second only."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor) -> Any:
        middle, out = a * weight, a.exp()
        ctx.save_for_backward(a, middle, out)
        ctx.weight, ctx.factor = weight, 3
        return out, middle.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        a, middle, out = ctx.saved_tensors
        middle.mul_(grad)
        return grad * out + middle + other * ctx.weight * ctx.factor, middle * a


@pytest.mark.parametrize("front_end", [strict, default])
def test_what_else_is_kept_stays_as_it_is(front_end: Apply) -> None:
    def outcome(run: Apply) -> list[Any]:
        a, w = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
        found: list[Any] = []
        for _ in range(2):
            out, total = run(a, w)
            (out.sum() * 2 + total).backward()
            found += [out.detach(), a.grad.clone(), w.grad.clone()]  # type: ignore[union-attr]
        out, total = run(a * 1, w)
        out.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
        return [*found, a.grad, w.grad]

    assert_equal(outcome(_SavesMuch.apply), outcome(front_end(_SavesMuch.apply)))


@pytest.mark.parametrize("front_end", [strict, default])
def test_a_saved_tensor_that_the_caller_changes(front_end: Apply) -> None:
    """What a custom function saved is checked as what torch's own functions save."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return _ChangesTheGradient.apply(a, b) + 1  # type: ignore[no-any-return]

    for run in (fn, front_end(fn)):
        a, b = torch.ones(2, requires_grad=True), torch.ones(2)
        out = run(a, b)
        b.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

"""Custom backwards that write into what the forward saved, or into the gradient they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .common import Make, assert_same, fresh, relations, state

Entry = Callable[..., Any]


class DoubleWhatWasSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return grad.clone()


class CountBackwards(torch.autograd.Function):
    """Increments a counter in each backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Tensor) -> Tensor:
        ctx.save_for_backward(counter)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (counter,) = ctx.saved_tensors
        counter.add_(1)
        return grad.clone(), None


def same_through_backward(entry: Entry, fn: Callable[..., Any], make: Make, *, nonleaf: bool) -> None:
    """Two calls, one backward each; after each step, compare all inputs, and the gradients."""

    def run(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
        seen: list[tuple[str, Any]] = []
        for seed in range(2):
            inputs = fresh(make, nonleaf=nonleaf, seed=seed)
            everything = [*inputs.roots, *inputs.args]
            out = fn(*inputs.args)
            seen.append((f"call {seed}", [state(t) for t in [*everything, out]]))
            seen.append((f"relations {seed}", relations([*everything, out])))
            (out * out.detach().cos()).sum().backward()
            seen.append((f"backward {seed}", [state(t) for t in [*everything, out]]))
            seen.append((f"gradients {seed}", [t.grad for t in inputs.roots]))
            seen.append((f"versions {seed}", [t._version for t in everything]))
        return seen

    assert_same(run(entry(fn)), run(fn))


NONLEAF = pytest.mark.parametrize("nonleaf", [True, False])


def through_custom(x: Tensor, y: Tensor) -> Any:
    return x * DoubleWhatWasSaved.apply(y)


@NONLEAF
def test_saved_input_without_grad_never_reaches_that_backward(entry: Entry, nonleaf: bool) -> None:
    same_through_backward(
        entry,
        through_custom,
        lambda: [torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)],
        nonleaf=nonleaf,
    )


@NONLEAF
def test_saved_input_with_grad_is_written(entry: Entry, nonleaf: bool) -> None:
    """Eager lets a backward write, without grad, even into a leaf that requires grad."""
    same_through_backward(
        entry,
        through_custom,
        lambda: [torch.randn(3, 3, requires_grad=True) for _ in range(2)],
        nonleaf=nonleaf,
    )


@NONLEAF
def test_saved_input_without_grad_is_written_when_another_has_grad(entry: Entry, nonleaf: bool) -> None:
    same_through_backward(
        entry,
        lambda x, counter: CountBackwards.apply(x, counter).sin(),
        lambda: [torch.randn(3, requires_grad=True), torch.zeros(())],
        nonleaf=nonleaf,
    )


def test_saved_intermediate_is_written(entry: Entry) -> None:
    same_through_backward(
        entry,
        lambda x: DoubleWhatWasSaved.apply(x.sin()).cos(),
        lambda: [torch.randn(3, requires_grad=True)],
        nonleaf=True,
    )


def test_buffer_is_written(entry: Entry) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, 3))
            self.counter = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            return CountBackwards.apply(x * self.weight, self.counter)

    def run(module: Counted, fn: Callable[..., Any]) -> list[Tensor | None]:
        for i in range(3):
            fn(torch.full((3,), float(i))).sum().backward()
        return [module.counter, module.weight.grad]

    eager, ours = Counted(), Counted()
    torch.testing.assert_close(run(ours, entry(ours)), run(eager, eager))
    assert ours.counter == 3


def test_second_backward_is_refused_when_the_first_wrote(entry: Entry) -> None:
    """What was saved is not what it was any more: eager says so, and nothing may be silently wrong."""

    def run(fn: Callable[..., Any]) -> tuple[str, Tensor]:
        x = torch.linspace(1, 2, 3).requires_grad_()
        y = torch.linspace(3, 4, 3).requires_grad_()
        out = fn(x, y).sum()
        out.backward(retain_graph=True)
        try:
            out.backward()
        except RuntimeError:
            return "refused", y.detach()
        return "allowed", y.detach()

    assert run(through_custom)[0] == "refused"
    found, expected = run(entry(through_custom)), run(through_custom)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.differs_from_peer("the caller's tangent stays as it was")
def test_gradient_is_written(entry: Entry) -> None:
    class DoubleGradient(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad.mul_(2)

    def run(fn: Callable[..., Any]) -> tuple[Tensor | None, Tensor]:
        x = torch.linspace(0, 1, 3).requires_grad_()
        tangent = torch.ones(3)
        fn(x).backward(tangent)
        return x.grad, tangent

    torch.testing.assert_close(run(entry(DoubleGradient.apply)), run(DoubleGradient.apply))

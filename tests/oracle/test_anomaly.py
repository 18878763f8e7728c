"""Anomaly mode: which node made the NaN, and on which line of the forward it was born."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .common import strict
from .plays import agree

pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:Error detected:UserWarning"),
]


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.sqrt()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad / (2 * out)


def masked(x: Tensor) -> Tensor:
    """The NaN of the square root never reaches x."""
    h = (x * 0).sqrt()
    return torch.where(x > 5, h, x) * 2


def second_of_two(x: Tensor) -> Tensor:
    """Only the gradient of the divisor is NaN."""
    h = x * 0
    return (x + 1) / torch.where(x > 5, x, h.neg() - 1e-30).neg().neg()


def own_rule(x: Tensor) -> Tensor:
    h = x * 0
    return Root.apply(h) * 3  # type: ignore[no-any-return]


def used_twice(x: Tensor) -> Tensor:
    h = x * 0
    return h * 2 + h.sqrt() + h.sin()


def with_dropout(x: Tensor) -> Tensor:
    h = torch.nn.functional.dropout(x, 0.5) * 0
    return h.sqrt()


def said(run: Callable[[Tensor], Tensor], *, create_graph: bool = False) -> tuple[str, str]:
    """The error, and the line that the warning names last."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            x = torch.zeros(3, requires_grad=True)
            out = (run(x) * 0).sum()
            with pytest.raises(RuntimeError) as error:
                torch.autograd.grad(out, x, create_graph=create_graph)
    lines = [line.strip() for w in caught for line in str(w.message).splitlines()]
    return str(error.value), [w for w in lines if w.startswith("File") and "/torch/" not in w][-1]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("fn", [masked, second_of_two, used_twice, with_dropout])
def test_eagers_error_and_line(fn: Callable[[Tensor], Tensor], create_graph: bool) -> None:
    compiled = strict(fn)
    for _ in range(2):
        expected = said(fn, create_graph=create_graph)
        assert f"in {fn.__name__}" in expected[1]
        assert said(compiled, create_graph=create_graph) == expected


def test_own_derivative_rule() -> None:
    """Eager names the call of the rule; compiled, the line inside it."""
    expected, _ = said(own_rule)
    found, line = said(strict(own_rule))
    assert found == expected
    assert line.endswith("in forward")


def test_second_derivative() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.pow(1.5)  # the second derivative divides by zero

    def message(run: Any) -> tuple[str, str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.autograd.detect_anomaly():
                x = torch.zeros(3, requires_grad=True)
                (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
                with pytest.raises(RuntimeError) as error:
                    torch.autograd.grad((g * 0).sum(), x)
        return str(error.value), "\n".join(str(w.message) for w in caught)

    expected, _ = message(fn)
    error, text = message(strict(fn))
    assert error == expected
    assert "x.pow(1.5)" in text


def test_nothing_wrong() -> None:
    """Gradients and random numbers as without anomaly mode."""

    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5).exp() * torch.rand_like(x)

    def play(run: Any) -> Any:
        torch.manual_seed(0)
        with torch.autograd.detect_anomaly():
            x = torch.ones(8, requires_grad=True)
            out = run(x)
            out.sum().backward(retain_graph=True)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return x.grad, g, torch.autograd.grad(g.sum(), x), torch.rand(2)

    agree(fn, play)


def test_ops_of_a_backward_know_their_line() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        return h.exp()

    compiled = strict(fn)
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    (entry,) = compiled.entries  # type: ignore[attr-defined]
    (backward,) = entry.entry.split.backwards
    lines = [
        (str(n.target), n.meta["stack_trace"].splitlines()[-1].strip())
        for n in backward.graph.nodes
        if n.op == "call_function"
    ]
    assert ("aten.cos.default", "h = x.sin()") in lines
    assert ("aten.mul.Tensor", "return h.exp()") in lines

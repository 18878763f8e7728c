"""The checked backend names the first op, and the line, where a backend differs from eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.backends.checked import Checked
from aheadgrad.backends.contract import Request
from aheadgrad.errors import BackendDiffers

aten = torch.ops.aten


def wrong_tanh(request: Request) -> Any:
    """A backend that is wrong about one op."""
    module = request.module
    for node in module.graph.nodes:
        if node.target is aten.tanh.default:
            node.target = aten.sin.default
    module.recompile()
    return lambda args: list(module(*args))


def model(x: Tensor, w: Tensor) -> Tensor:
    h = torch.cos(x) @ w
    h = torch.tanh(h)  # wrong
    return (h * 2).sum()


def test_the_op_and_the_line_are_named() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    compiled = aheadgrad.compile(model, backend=Checked(wrong_tanh), frontend="trace")
    with pytest.raises(BackendDiffers) as caught:
        compiled(x, w)
    assert "aten.tanh" in str(caught.value)
    assert "h = torch.tanh(h)  # wrong" in str(caught.value)
    assert "output 0" in str(caught.value)


def test_what_agrees_runs_with_random_numbers_and_at_second_order() -> None:
    def fn(x: Tensor) -> Tensor:
        return (torch.dropout(x.sin(), 0.5, True) * x).sum()

    def right(request: Request) -> Any:
        module = request.module
        return lambda args: list(module(*args))

    def run(fn: Any) -> Any:
        torch.manual_seed(0)
        (g,) = torch.autograd.grad(fn(x), x, create_graph=True)
        return g, torch.autograd.grad(g.square().sum(), x)

    x = torch.randn(5, requires_grad=True)
    compiled = aheadgrad.compile(fn, backend=Checked(right), frontend="trace", fallback="error")
    torch.testing.assert_close(run(compiled), run(fn), rtol=0, atol=0)


def test_inductor_is_checked_by_name() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    compiled = aheadgrad.compile(model, backend="checked", frontend="trace")
    (found,) = torch.autograd.grad(compiled(x, w), w)
    (expected,) = torch.autograd.grad(model(x, w), w)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

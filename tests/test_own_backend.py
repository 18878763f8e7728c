"""A backend of the user's: what it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.backends.contract import Request
from aheadgrad.errors import BackendFailed, FallbackError, FallbackWarning

WAYS: list[dict[str, Any]] = [{}, {"fullgraph": True}, {"frontend": "trace"}]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


def wave(x: Tensor) -> Tensor:
    return x.sin()


def failing(role: str, error: Exception) -> Callable[[Request], Any]:
    def mine(request: Request) -> Any:
        if request.role == role:
            raise error
        module = request.module
        return lambda args: list(module(*args))

    return mine


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("role", ["forward", "backward"])
def test_what_it_raises_reaches_the_caller(options: dict[str, Any], role: str) -> None:
    fast = aheadgrad.compile(wave, backend=failing(role, ZeroDivisionError("here")), **options)
    told = f"'mine' raised ZeroDivisionError: here while it compiled this {role} program"
    with pytest.raises(BackendFailed, match=told) as seen:
        fast(torch.ones(2, requires_grad=True)).sum().backward()
    assert isinstance(seen.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("options", [{}, {"frontend": "trace"}])
def test_it_may_leave_a_call_to_eager(options: dict[str, Any]) -> None:
    refusing = failing("inference", FallbackError("no sines"))
    fast = aheadgrad.compile(wave, backend=refusing, **options)
    with pytest.warns(FallbackWarning, match="no sines"):
        assert torch.equal(fast(torch.ones(2)), wave(torch.ones(2)))


def test_one_that_takes_no_symbolic_sizes() -> None:
    def mine(request: Request) -> Any:
        if request.mode is not None and any(isinstance(n, torch.SymInt) for n in sizes(request)):
            raise ZeroDivisionError("symbols")
        module = request.module
        return lambda args: list(module(*args))

    def sizes(request: Request) -> list[Any]:
        return [n for t in request.example_inputs() if isinstance(t, Tensor) for n in t.shape]

    fast = aheadgrad.compile(wave, backend=mine)
    fast(torch.ones(3))
    with pytest.warns(FallbackWarning, match="symbolic sizes"):
        assert torch.equal(fast(torch.ones(4)), wave(torch.ones(4)))


def test_a_backward_with_symbolic_sizes_is_no_call_to_leave_to_eager() -> None:
    fast = aheadgrad.compile(wave, backend=failing("backward", ZeroDivisionError("here")), dynamic=True)
    out = fast(torch.ones(3, requires_grad=True))
    with pytest.raises(BackendFailed, match="this backward program"):
        out.sum().backward()

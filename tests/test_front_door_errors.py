"""The default front end and errors: the user's come as in eager, Dynamo's leave a frame uncompiled."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import symbolic_convert

import aheadgrad
from aheadgrad.errors import FallbackError, FallbackWarning


class Own(Exception):
    def __init__(self, what: str, code: int) -> None:
        super().__init__(what, code)
        self.code = code


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three is refused")  # here
        return x * 2


picky = Picky()


def matmul(x: Tensor) -> Tensor:
    return (x + 1) @ torch.ones(2)  # here


def value_error(x: Tensor) -> Tensor:
    y = x * 2
    if x.shape[0] == 3:
        raise ValueError(f"no {tuple(x.shape)} please")  # here
    return y


def in_a_submodule(x: Tensor) -> Tensor:
    return picky(x + 1) * 2


def nested(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return y.view(2)  # here

    return inner(x.sin()) + 1


def index(x: Tensor) -> Tensor:
    return x * [1, 2, 3][x.shape[0]]  # here


def key(x: Tensor) -> Tensor:
    return x * {2: 5.0}[x.shape[0]]  # here


def own(x: Tensor) -> Tensor:
    if x.shape[0] == 3:
        raise Own("mine", 7)  # here
    return x + 1


def assertion(x: Tensor) -> Tensor:
    assert x.shape[0] != 3, "three is asserted away"  # here
    return x + 1


def attribute(x: Tensor) -> Any:
    return x.nothing_of_that_name if x.shape[0] == 3 else x * 2  # here


def division(x: Tensor) -> Tensor:
    return x * (1 // (x.shape[0] - 3))  # here


def chained(x: Tensor) -> Tensor:
    try:
        return x * {2: 5.0}[x.shape[0]]
    except KeyError as error:
        raise RuntimeError("no such factor") from error  # here


ERRORS = [
    matmul, value_error, in_a_submodule, nested, index, key, own, assertion, attribute, division, chained,
]  # fmt: skip


def told(run: Callable[..., Any], *args: Any) -> Any:
    """Type, arguments, cause and the user's line of what is raised."""
    with pytest.raises(Exception) as caught:
        run(*args)
    error = caught.value
    lines = [f.line or "" for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
    assert lines[-1].endswith("# here"), lines
    return type(error), error.args, vars(error), type(error.__cause__), lines[-1]


@pytest.mark.parametrize("fn", ERRORS)
@pytest.mark.parametrize("options", [{}, {"fallback": "error"}, {"fullgraph": True}])
def test_an_error_of_the_users(fn: Callable[[Tensor], Any], options: dict[str, Any]) -> None:
    torch.compiler.reset()
    fast = aheadgrad.compile(fn, dynamic=False, **options)
    if fn in (own, assertion) and "fullgraph" in options:
        pytest.skip("Dynamo breaks the graph there, which fullgraph=True refuses")
    expected = told(fn, torch.ones(3))
    for _ in range(2):
        assert told(fast, torch.ones(3)) == expected
    good = torch.ones(2)
    assert torch.equal(fast(good), fn(good))
    assert torch.equal(fast(good), fn(good))
    assert len(fast.entries) >= 1
    assert fast.fallbacks == {}
    assert told(fast, torch.ones(3)) == expected


def test_a_frame_that_always_raises_is_left_alone_at_last() -> None:
    def helper(x: Tensor) -> Tensor:
        raise KeyError("always")

    def fn(x: Tensor) -> Tensor:
        return helper(x)

    fast = aheadgrad.compile(fn)
    for _ in range(20):
        with pytest.raises(KeyError, match="always"):
            fast(torch.ones(2))
    assert "all of fn is left to eager" in str(fast.breaks)
    assert fast.fallbacks == {}


@pytest.fixture
def broken_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo makes a mistake of its own wherever it looks at a function called `unlucky`."""
    torch.compiler.reset()
    run = symbolic_convert.InstructionTranslatorBase.run

    def broken(self: Any) -> None:
        if self.f_code.co_name == "unlucky":
            raise KeyError("an internal mistake")
        run(self)

    monkeypatch.setattr(symbolic_convert.InstructionTranslatorBase, "run", broken)


def unlucky(x: Tensor) -> Tensor:
    return x * 2 + 1


@pytest.mark.usefixtures("broken_dynamo")
def test_a_mistake_of_dynamos() -> None:
    fast = aheadgrad.compile(unlucky)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(fast(torch.ones(3)), torch.full((3,), 3.0))
    (warning,) = seen
    assert warning.category is FallbackWarning
    assert warning.filename == __file__
    for words in ('frontend="trace"', "an internal mistake", "unlucky", "test_front_door_errors.py"):
        assert words in str(warning.message)
    assert list(fast.fallbacks.values()) == [3]
    assert fast.entries == []
    assert torch.equal(aheadgrad.compile(unlucky, frontend="trace")(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.usefixtures("broken_dynamo")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_mistake_of_dynamos_as_an_error(fullgraph: bool) -> None:
    runs = []

    def unlucky(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    fast = aheadgrad.compile(unlucky, fallback="error", fullgraph=fullgraph)
    for _ in range(2):
        with pytest.raises(FallbackError, match="an internal mistake"):
            fast(torch.ones(3))
    assert runs == []


@pytest.mark.usefixtures("broken_dynamo")
def test_a_mistake_in_a_part_leaves_the_rest_compiled() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return unlucky(y)

    fast = aheadgrad.compile(fn)
    with pytest.warns(FallbackWarning, match="an internal mistake"):
        fast(torch.ones(3))
    assert torch.equal(fast(torch.ones(3)), torch.ones(3).sin() * 2 + 1)
    assert len(fast.entries) == 1


@pytest.mark.usefixtures("broken_dynamo")
def test_an_error_of_the_users_behind_a_mistake_of_dynamos() -> None:
    def unlucky(x: Tensor) -> Tensor:
        return x @ torch.ones(2)  # here

    fast = aheadgrad.compile(unlucky)
    assert told(fast, torch.ones(3)) == told(unlucky, torch.ones(3))
    assert fast.fallbacks == {}


def test_what_dynamo_fails_on_leaves_dispatch_as_it_was() -> None:
    """Its frames hold guards, which put back dispatch keys when they die: eager then had no gradients."""
    w = torch.linspace(-1, 1, 4).view(2, 2).requires_grad_()

    def fn(x: Tensor) -> Tensor:
        each = torch.func.hessian(lambda row: (row * row @ w).sin().sum())
        return torch.vmap(each)(x).sum()

    x = torch.linspace(0, 1, 6).view(3, 2)
    fast = aheadgrad.compile(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert torch.equal(fast(x), fn(x))
    assert nn.Linear(2, 2)(x).requires_grad
    with pytest.raises(FallbackError):
        aheadgrad.compile(fn, fallback="error")(x)
    assert nn.Linear(2, 2)(x).requires_grad

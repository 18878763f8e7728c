"""Ops on lists of tensors (`torch._foreach_mul_`): version counters, and memory that a list shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.testing import Inputs, assert_same

from .common import default, strict, uncompiled

OPS = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
ARGUMENTS: list[Callable[[Tensor, Tensor], tuple[Any, ...]]] = [
    lambda x, y: ([x, y],),
    lambda x, y: ([x], [y * 1]),
    lambda x, y: ([x, y], 2.0),
    lambda x, y: ([x], [y * 1], [y * 2]),
    lambda x, y: ([x], [y * 1], 0.5),
]


def make(grad: bool = True) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(3, generator=generator, dtype=torch.float64) * 0.5 + 0.3 for _ in range(2))
    x.requires_grad_(grad)
    return Inputs((x * 1, y), leaves=[x] if grad else [])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_written_in_place(name: str, grad: bool) -> None:
    found = 0
    for arguments in ARGUMENTS:

        def fn(x: Tensor, y: Tensor, arguments: Any = arguments) -> Any:
            getattr(torch, name)(*arguments(x, y))
            return x * 2, y * 2

        try:
            fn(*make(grad).args)
        except (TypeError, RuntimeError):
            continue  # not a call that this op knows
        assert_same(fn, strict(fn), lambda: make(grad))
        found += 1
    assert found


@pytest.mark.parametrize("front_end", [strict, default])
def test_what_eager_saved_is_known_to_have_changed(front_end: Any) -> None:
    def change(y: Tensor) -> None:
        torch._foreach_mul_([y], 4.0)

    for run in (change, front_end(change)):
        x, y = make().args
        out = x * y
        run(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("front_end", [strict, default])
def test_what_was_saved_inside_is_known_to_have_changed(front_end: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = x * y
        out = z.sin()
        torch._foreach_mul_([z], 4.0)
        return out

    assert_same(fn, front_end(fn), make)


SHARING: dict[str, Callable[[Tensor], Any]] = {
    "twice": lambda x: torch._foreach_mul_([x, x], 2.0),
    "a part": lambda x: torch._foreach_neg_([x, x[:2]]),
    "windows": lambda x: torch._foreach_neg_([x[:2], x[1:]]),
    "read later": lambda x: torch._foreach_add_([x[:2], x[2:]], [torch.ones(2), x[:1]]),
}
APART: dict[str, Callable[[Tensor], Any]] = {
    "halves": lambda x: torch._foreach_mul_([x[:1], x[1:]], 3.0),
    "every other": lambda x: torch._foreach_add_([x[::2], x[1::2]], 1.0),
    "by itself": lambda x: torch._foreach_mul_([x], [x]),
    "read before": lambda x: torch._foreach_add_([x[:1], x[1:]], [x[1:2], torch.ones(2)]),
}


def plain() -> Inputs:
    return Inputs((torch.arange(1.0, 4.0),))


@pytest.mark.parametrize("change", SHARING.values(), ids=SHARING.keys())
def test_lists_that_share_memory_are_left_to_eager(change: Any) -> None:
    uncompiled(change, plain, "a list of tensors that share memory is written to")


@pytest.mark.parametrize("change", APART.values(), ids=APART.keys())
def test_lists_that_lie_apart(change: Any) -> None:
    assert_same(change, aheadgrad.compile(change, fallback="error", frontend="trace"), plain)

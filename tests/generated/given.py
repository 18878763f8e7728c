"""What the programs found by fuzzing share: inputs, and the check against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import aheadgrad
from aheadgrad.testing import Inputs, assert_same

Given = tuple[list[Tensor], tuple[Tensor, ...]]


def check(
    fn: Callable[..., Any], make: Callable[[], Given], *, frontend: str = "trace", **options: Any
) -> None:
    """`make` gives the leaves and the arguments; falling back is a failure too."""

    def make_inputs() -> Inputs:
        leaves, args = make()
        return Inputs(args=args, leaves=leaves)

    assert_same(fn, aheadgrad.compile(fn, fallback="error", frontend=frontend), make_inputs, **options)


def vector() -> Given:
    x = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
    return [x], (x,)


def plain() -> Given:
    return [], (torch.tensor([0.5, -1.25, 2.0]),)


def matrix() -> Given:
    x = torch.tensor([[0.5, -1.25, 2.0], [1.5, 0.25, -0.75]], requires_grad=True)
    return [x], (x,)


def with_history() -> Given:
    x = torch.tensor([[0.5, -1.25, 2.0], [1.5, 0.25, -0.75]], requires_grad=True)
    return [x], (x * 1.5,)


def every_other_column() -> Given:
    x = torch.arange(9.0).reshape(3, 3)
    return [], (x[:, ::2],)

"""`torch.func` transforms inside of compiled functions: of functions that close over tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from tests.oracle.common import leaf

WEIGHT, SCALE = leaf(3, 3, seed=31), leaf(3, seed=32, grad=False)
CLOSED_OVER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda x, w: torch.func.grad(lambda r: ((r @ w) * WEIGHT).sin().sum())(x),
    "vmap of grad": lambda x, w: torch.func.vmap(torch.func.grad(lambda r: (r @ WEIGHT @ w).sin().sum()))(x),
    "hessian": lambda x, w: torch.func.hessian(lambda r: ((r @ w) ** 3).sum() + (WEIGHT @ r).exp().sum())(
        x[0]
    ),
    "jacrev": lambda x, w: torch.func.jacrev(lambda r: (r @ w * WEIGHT[0]).exp())(x[0]),
    "jvp": lambda x, w: torch.func.jvp(lambda r: (r @ w * WEIGHT[0]).exp(), (x,), (w,)),
    "a new tensor": lambda x, w: torch.func.vmap(
        torch.func.grad(lambda r: ((torch.zeros(3) + r) * SCALE + w[0]).pow(2).sum())
    )(x),
}


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("name", CLOSED_OVER)
def test_transforms_inside_of_functions_that_close_over_tensors(name: str, frontend: Any) -> None:
    fn = CLOSED_OVER[name]

    def run(fn: Callable[..., Any]) -> list[Any]:
        x, w = leaf(3, 3), leaf(3, 3, seed=1)
        outs = torch.utils._pytree.tree_leaves(fn(x, w))
        return [*outs, *torch.autograd.grad([t.sum() for t in outs], (x, w, WEIGHT), allow_unused=True)]

    compiled = aheadgrad.compile(fn, frontend=frontend, fallback="error")
    for eager, ours in zip(run(fn), run(compiled), strict=True):
        assert (eager is None) == (ours is None)
        assert eager is None or torch.allclose(eager, ours, rtol=1e-4, atol=1e-5)

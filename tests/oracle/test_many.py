"""More than 255 of something: Python's own limits on what one line of generated code may take apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .plays import agree, double, grad

MANY = 260


def spread(*inputs: Tensor) -> tuple[Tensor, ...]:
    total = torch.stack(inputs).sum(0).sin()
    return tuple(total * x for x in inputs)


@pytest.mark.parametrize("inner", [False, True], ids=["leaves", "inner"])
def test_many_inputs_and_outputs(inner: bool) -> None:
    def play(run: Any) -> Any:
        xs = [double(2, seed=k) for k in range(MANY)]
        outs = run(*([x * 2 for x in xs] if inner else xs))
        grads = grad(sum(outs).sum(), xs)
        return [*outs, *grads, *grad(sum(g.sum() for g in grads), xs, create_graph=False)]

    agree(spread, play)


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(70):
        x = torch.tanh(x * w)
    return x


def test_many_saved_values() -> None:
    def play(run: Any) -> Any:
        x, w = double(3, seed=1), double(3, seed=2)
        out = run(x * 1, w)
        (first,) = grad(out, x)
        (second,) = grad(first, x)
        return grad(second.sum() + first.sum() + out.sum(), [x, w], create_graph=False)

    agree(chain, play)

"""What support for higher derivatives costs a call that takes first ones only, against `any_order=False`.

Inputs that are neither leaves nor saved for backward are the dear case: each gets a link.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import aheadgrad

from .measure import FIRST_ONLY, OURS, Bar, Row, in_turns
from .step import layer

ROUNDS = 61
CALLS = 200
WARM_UP_CALLS = 100
LIMIT = 1.05


def layers() -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """The smallest step: everything is a leaf."""
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    return layer, leaves, leaves


def perceptron() -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """A model called with data."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, [torch.randn(8, 16)], list(model.parameters())


def block() -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """A layer of a transformer in the middle of a model: its input has a history, and is not saved."""
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 8, 32, requires_grad=True)
    return model, [x + 0], [x, *model.parameters()]


def stopwatch(make: Callable[[], Any], **options: Any) -> Callable[[], float]:
    """A turn: microseconds of a call and its backward, over many calls."""
    torch.manual_seed(0)
    fn, inputs, leaves = make()
    compiled = aheadgrad.compile(fn, fallback="error", **options, frontend="trace")
    tangent = torch.ones_like(compiled(*inputs))

    def turn(calls: int = CALLS) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            torch.autograd.grad(compiled(*inputs), leaves, tangent, retain_graph=True)
        return (time.perf_counter() - start) / calls * 1e6

    turn(WARM_UP_CALLS)
    return turn


def run() -> list[Row]:
    rows = []
    for make in (layers, perceptron, block):
        turns = {OURS: stopwatch(make), FIRST_ONLY: stopwatch(make, any_order=False)}
        figures = in_turns(turns, ROUNDS)
        rows.append(Row(f"first-order step, {make.__name__}", "µs", figures, (Bar(FIRST_ONLY, LIMIT),)))
    return rows

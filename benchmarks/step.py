"""What a compiled call costs by itself: a training step whose arithmetic is next to nothing."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

import aheadgrad

from . import peer
from .measure import DYNAMO, EAGER, OURS, TORCH, Bar, Row, in_turns

ROUNDS = 41
CALLS = 300
WARM_UP_CALLS = 100
LIMIT_TORCH = 0.50
LIMIT_EAGER = 1.30


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x * w + b)


def stopwatch(fn: Callable[..., Tensor]) -> Callable[[], float]:
    """A turn: microseconds of one training step with `fn`, over many calls."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    tangent = torch.randn(4, 4)

    def turn(calls: int = CALLS) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            torch.autograd.grad(fn(x, w, b), (x, w, b), tangent)
        return (time.perf_counter() - start) / calls * 1e6

    turn(WARM_UP_CALLS)
    return turn


def run() -> list[Row]:
    contenders = {
        EAGER: layer,
        DYNAMO: torch.compile(layer, backend="aot_eager"),
        TORCH: peer.compile_function(layer),
        OURS: aheadgrad.compile(layer, fallback="error", frontend="trace"),
    }
    turns = {name: stopwatch(fn) for name, fn in contenders.items()}
    bars = (Bar(TORCH, LIMIT_TORCH), Bar(EAGER, LIMIT_EAGER))
    return [Row("training step, three 4x4 inputs", "µs", in_turns(turns, ROUNDS), bars)]

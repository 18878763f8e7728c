"""What checking an entry's assumptions costs: a compiled call against the same call without its check.

Both take turns in one process, a few calls at a time. Medians of figures this small are those of the
machine's other work, so the turns are timed in processor time, and the fastest tenth of them counts.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import aheadgrad

from .measure import GUARDED, UNGUARDED, Difference, Row
from .models import gpt

PAIRS = 1500
CALLS = 8
WARM_UP_CALLS = 60
LIMIT_FUNCTION = 3.0
LIMIT_MODULE = 15.0


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x * w + b)


class Stack(nn.Module):
    """75 linear layers, 150 parameters, all of them used in very few operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(75))

    def forward(self, x: Tensor) -> Tensor:
        layers: list[Any] = list(self.layers)
        weights = torch.stack([layer.weight for layer in layers])
        biases = torch.stack([layer.bias for layer in layers])
        return (x * weights).sum() + biases.sum()


class Chain(nn.Module):
    """The same layers one after the other, with what usually stands between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1)) for _ in range(75))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def in_pairs(one: Callable[[], Any], other: Callable[[], Any], count: int) -> tuple[float, float]:
    """Microseconds of one call of either, in turns: the tenth of all turns that were the fastest end here."""

    def turn(call: Callable[[], Any]) -> float:
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        return (time.thread_time() - start) / CALLS * 1e6

    gc.collect()
    gc.freeze()
    gc.disable()
    ones, others = [], []
    for _ in range(count):
        ones.append(turn(one))
        others.append(turn(other))
    gc.enable()
    gc.unfreeze()
    return statistics.quantiles(ones, n=10)[0], statistics.quantiles(others, n=10)[0]


def measure(
    subject: str, compiled: Any, args: tuple[Any, ...], limit: float | None, count: int = PAIRS
) -> Row:
    for _ in range(WARM_UP_CALLS):
        compiled(*args)
    guarded = compiled.entries[0]
    inputs = guarded.check(args, {})
    run = guarded.entry.run
    with_check, without = in_pairs(lambda: compiled(*args), lambda: run(*inputs), count)
    figures = {GUARDED: with_check, UNGUARDED: without}
    bars = () if limit is None else (Difference(with_check - without, limit),)
    return Row(subject, "µs", figures, bars)


def run() -> list[Row]:
    """The two bars; then larger modules, whose own time hides the check, for the record."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    function = aheadgrad.compile(layer, fallback="error", frontend="trace")
    few = aheadgrad.compile(Stack(), fallback="error", frontend="trace")
    chain = aheadgrad.compile(Chain().eval(), fallback="error", frontend="trace")
    case = gpt(12)
    whole = aheadgrad.compile(case.fresh(), fallback="error", frontend="trace")
    count = len(list(case.model.parameters()))
    return [
        measure("a function of three tensors", function, (x, w, b), LIMIT_FUNCTION),
        measure("a module with 150 parameters", few, (x.detach(),), LIMIT_MODULE),
        measure("the same layers in a chain of 300 modules", chain, (x.detach(),), None, PAIRS // 3),
        measure(f"{case.name}, {count} parameters", whole, case.inputs, None, PAIRS // 10),
    ]

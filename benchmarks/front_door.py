"""What a call through the default front end costs, beside Dynamo with torch's own backends and tracing."""

import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import aheadgrad

from .measure import DYNAMO, DYNAMO_ONLY, EAGER, OURS, TRACING, Bar, Row, in_turns

ROUNDS = 31
CALLS = 200
WARM_UP_CALLS = 50
LIMIT_DYNAMO_ONLY = 1.30
LIMIT_AOT = 0.50
Call = Callable[[Any], Callable[[], Any]]  # from what is compiled to one call of it


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x * w + b)


def many(*tensors: Tensor) -> Tensor:
    return torch.stack([t.sin() for t in tensors]).sum()


def own_code(fn: Any) -> Any:
    """A copy with code of its own: Dynamo keeps what it compiled with the code."""
    if isinstance(fn, nn.Module):
        return fn
    code = fn.__code__.replace(co_filename=fn.__code__.co_filename)
    return FunctionType(code, fn.__globals__, fn.__name__)


def row(subject: str, make: Callable[[], Any], call: Call, *, training: bool) -> Row:
    """`call` makes, from something compiled, what is timed."""
    contenders: dict[str, Any] = {
        EAGER: make(),
        DYNAMO_ONLY: torch.compile(own_code(make()), backend="eager"),
        DYNAMO: torch.compile(own_code(make()), backend="aot_eager"),
        TRACING: aheadgrad.compile(own_code(make()), fallback="error", frontend="trace"),
        OURS: aheadgrad.compile(own_code(make()), fallback="error"),
    }

    def stopwatch(fn: Any) -> Callable[[], float]:
        one = call(fn)

        def turn(calls: int = CALLS) -> float:
            start = time.perf_counter()
            for _ in range(calls):
                one()
            return (time.perf_counter() - start) / calls * 1e6

        turn(WARM_UP_CALLS)
        return turn

    figures = in_turns({name: stopwatch(fn) for name, fn in contenders.items()}, ROUNDS)
    bars = (Bar(DYNAMO_ONLY, LIMIT_DYNAMO_ONLY), *([Bar(DYNAMO, LIMIT_AOT)] if training else []))
    return Row(subject, "µs", figures, bars)


def run() -> list[Row]:
    torch.manual_seed(0)
    x, w, b, tangent = (torch.randn(4, 4) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    hundred = [torch.randn(4, requires_grad=True) for _ in range(100)]

    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def step(fn: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(fn(*leaves), leaves, tangent)

    def step_of_module(fn: Any) -> Callable[[], Any]:
        parameters = list(fn.parameters())
        return lambda: torch.autograd.grad(fn(x), parameters, tangent)

    return [
        row("inference, three 4x4 inputs", lambda: layer, lambda fn: lambda: fn(x, w, b), training=False),
        row(
            "forward for training, three inputs", lambda: layer, lambda fn: lambda: fn(*leaves), training=True
        ),
        row("training step, three inputs", lambda: layer, step, training=True),
        row("training step, a small module", module, step_of_module, training=True),
        row(
            "training step, 100 inputs",
            lambda: many,
            lambda fn: lambda: torch.autograd.grad(fn(*hundred), hundred),
            training=False,
        ),
    ]

"""What tensor subclasses cost on top of the plain call: taken apart at the entry, put together at the exit.

The same arithmetic on the same parts, once with the parts passed and returned one by one and once inside
subclasses. The difference is divided by the number of subclasses.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad

from .measure import OURS, PLAIN, Row, in_turns

ROUNDS = 61
CALLS = 200
COUNT = 8
LIMIT = 2.0


@dataclass(frozen=True)
class Extra:
    """What each of `count` subclasses adds to the plain call, in microseconds."""

    what: str
    count: int
    limit: float

    def each(self, row: Row) -> float:
        return (row.figures[OURS] - row.figures[PLAIN]) / self.count

    def holds(self, row: Row) -> bool:
        return self.each(row) <= self.limit

    def describe(self, row: Row) -> str:
        verdict = "PASS" if self.holds(row) else "FAIL"
        return (
            f"{verdict}  {row.subject}: {self.each(row):.2f} µs per {self.what}  (bar: <= {self.limit:.1f})"
        )


def pairs(count: int) -> list[Any]:
    torch.manual_seed(0)
    return [TwoTensor(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(count)]


def take_apart(*wholes: Any) -> Tensor:
    return wholes[0].a + wholes[-1].b


def from_parts(*parts: Tensor) -> Tensor:
    return parts[0] + parts[-1]


def put_together(*parts: Tensor) -> list[Any]:
    made = [p * 2 for p in parts]
    return [TwoTensor(made[i], made[i + 1]) for i in range(0, len(made), 2)]


def leave_apart(*parts: Tensor) -> list[Tensor]:
    return [p * 2 for p in parts]


def scale_wholes(*wholes: Any) -> list[Any]:
    return [w * 2 for w in wholes]


def stopwatch(fn: Callable[..., Any], args: list[Any]) -> Callable[[], float]:
    fast = aheadgrad.compile(fn, fallback="error", frontend="trace")

    def turn() -> float:
        start = time.thread_time()  # small differences: other processes must not count
        for _ in range(CALLS):
            fast(*args)
        return (time.thread_time() - start) / CALLS * 1e6

    turn()
    return turn


def run() -> list[Row]:
    wholes = pairs(COUNT)
    parts = [part for w in wholes for part in (w.a, w.b)]
    cases = [
        ("8 arguments", take_apart, from_parts, wholes, Extra("subclass argument", COUNT, LIMIT)),
        ("8 outputs", put_together, leave_apart, parts, Extra("subclass output", COUNT, LIMIT)),
        (
            "8 arguments and 8 outputs",
            scale_wholes,
            leave_apart,
            wholes,
            Extra("argument or output", 2 * COUNT, LIMIT),
        ),
    ]
    rows = []
    with torch.no_grad():
        for subject, with_subclasses, plain, args, bar in cases:
            turns = {OURS: stopwatch(with_subclasses, args), PLAIN: stopwatch(plain, parts)}
            figures = in_turns(turns, ROUNDS)
            rows.append(Row(f"subclasses, {subject}", "µs", figures, (bar,)))  # type: ignore[arg-type]
    return rows

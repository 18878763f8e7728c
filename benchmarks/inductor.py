"""Inductor behind aheadgrad and behind torch.compile, on a CPU: the first step, cold and warm, and steps.

The first step is taken in processes of their own, after all is imported: once with an empty cache, and once
more with what that left behind; also with `cache=True`, which keeps what was recorded, too. Steps take turns
in one process. The models are without dropout: we draw the random numbers of eager, and torch.compile draws
others.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import aheadgrad

from .measure import COMPILED, EAGER, KEPT, KEPT_TRACING, OURS, TRACING, Bar, Row, in_turns
from .models import Case, convolution_net, gpt

CASES: dict[str, Callable[[], Case]] = {"gpt": lambda: gpt(6), "convolution": convolution_net}
ROUNDS = 31
STEPS = 10
LIMIT_STEP, LIMIT_COLD, LIMIT_WARM = 1.0, 0.9, 0.5
WAYS: dict[str, Callable[[Any], Any]] = {
    EAGER: lambda model: model,
    COMPILED: lambda model: torch.compile(model),
    TRACING: lambda model: aheadgrad.compile(model, backend="inductor", frontend="trace"),
    OURS: lambda model: aheadgrad.compile(model, backend="inductor"),
}
FIRST_STEPS = {
    **WAYS,
    KEPT_TRACING: lambda model: aheadgrad.compile(model, backend="inductor", frontend="trace", cache=True),
    KEPT: lambda model: aheadgrad.compile(model, backend="inductor", cache=True),
}


def case_of(name: str) -> Case:
    case = CASES[name]()
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return case


def first_step(name: str, way: str) -> float:
    """In this process: seconds."""
    import torch._inductor.compile_fx

    case = case_of(name)
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    run = FIRST_STEPS[way](case.model)
    start = time.perf_counter()
    run(*case.inputs).backward()
    return time.perf_counter() - start


def _elsewhere(name: str, way: str, caches: str) -> float:
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=caches, AHEADGRAD_CACHE_DIR=f"{caches}/aheadgrad")
    command = [sys.executable, "-m", "benchmarks.inductor", name, way]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def first_steps(name: str) -> list[Row]:
    """Cold and warm."""
    cold: dict[str, float] = {}
    warm: dict[str, float] = {}
    for way in (COMPILED, TRACING, OURS, KEPT_TRACING, KEPT):
        with tempfile.TemporaryDirectory() as caches:
            cold[way] = _elsewhere(name, way, caches)
            warm[way] = min(_elsewhere(name, way, caches) for _ in range(2))
    return [
        Row(f"{name}: first step, cold", "s", cold, (Bar(COMPILED, LIMIT_COLD),)),
        Row(f"{name}: first step, second process", "s", warm, (Bar(COMPILED, LIMIT_WARM),)),
    ]


def steps(name: str) -> Row:
    def turn(way: str) -> Callable[[], float]:
        case = case_of(name)
        run = WAYS[way](case.model)

        def measured(count: int = STEPS) -> float:
            start = time.perf_counter()
            for _ in range(count):
                case.model.zero_grad(set_to_none=True)
                run(*case.inputs).backward()
            return (time.perf_counter() - start) / count * 1e6

        measured(3)
        return measured

    figures = in_turns({way: turn(way) for way in WAYS}, ROUNDS)
    return Row(f"{name}: step", "µs", figures, (Bar(COMPILED, LIMIT_STEP),))


def run() -> list[Row]:
    return [row for name in CASES for row in (*first_steps(name), steps(name))]


if __name__ == "__main__":
    print(json.dumps(first_step(*sys.argv[1:])))

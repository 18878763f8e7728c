"""How long compiling takes, and how many nodes the joint graphs have.

Compiling is the first training step less a steady one, forward and backward both, because a
compiler is free to leave the backward until it is asked for. Every turn has a fresh copy of the model.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

import aheadgrad

from . import peer
from .measure import OURS, TORCH, Bar, Row, in_turns
from .models import CASES, Case, gpt

ROUNDS = 3
STEADY_STEPS = 3
LIMIT = 0.20

Compile = Callable[[nn.Module], Callable[..., Tensor]]


def ours(model: nn.Module) -> Callable[..., Tensor]:
    return aheadgrad.compile(model, fallback="error", frontend="trace")


def milliseconds_to_compile(case: Case, compile_model: Compile) -> float:
    model = case.fresh()
    start = time.perf_counter()
    step = compile_model(model)
    step(*case.inputs).backward()
    first = time.perf_counter() - start
    steady = []
    for _ in range(STEADY_STEPS):
        start = time.perf_counter()
        step(*case.inputs).backward()
        steady.append(time.perf_counter() - start)
    return (first - statistics.median(steady)) * 1e3


def run() -> list[Row]:
    contenders: dict[str, Compile] = {TORCH: peer.compile_module, OURS: ours}
    warm_up = gpt(layers=1)
    for compile_model in contenders.values():
        milliseconds_to_compile(warm_up, compile_model)
    rows = []
    for make in CASES:
        case = make()
        turns = {name: partial(milliseconds_to_compile, case, each) for name, each in contenders.items()}
        bars = (Bar(TORCH, LIMIT),) if make is gpt else ()
        rows.append(Row(f"compile {case.name}", "ms", in_turns(turns, ROUNDS), bars))
        nodes = {
            TORCH: float(peer.joint_nodes(case.fresh(), case.inputs)),
            OURS: float(len(aheadgrad.capture(case.fresh(), *case.inputs).graph.nodes)),
        }
        rows.append(Row(f"joint graph of {case.name}", "nodes", nodes))
    return rows

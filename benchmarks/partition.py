"""Splitting a joint graph: time, bytes saved, simulated peak and repeated arithmetic, beside torch's min-cut.

Both split the same joint graphs of torch: as traced, and with Inductor's decompositions. Bytes are those of
storages that the forward makes and keeps; the peak is simulated in the same way for both.
"""

import copy
import math
import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

import aheadgrad
from aheadgrad.compat import min_cut_rematerialization_partition
from examples.char_transformer import saved_bytes

from . import peer
from .measure import EAGER, OURS, TORCH, Bar, Difference, Row, in_turns
from .models import Case, convolution_net, diffusion, experts, gpt, recurrent_net, wide_gpt

MODELS: tuple[Callable[[], Case], ...] = (
    lambda: gpt(6),
    gpt,
    convolution_net,
    recurrent_net,
    diffusion,
    experts,
)
TIME, SAVED, LESS, BUDGET_TIME, ROUNDS = 0.2, 1.0, 0.75, 0.25, 3


def run() -> list[Row]:
    rows = []
    total = {TORCH: 0.0, OURS: 0.0}
    for make in MODELS:
        for decomposed in (False, True):
            case = make()
            joint, inputs, exits = peer.joint_graph(case.fresh(), case.inputs, decomposed=decomposed)
            name = case.name + (", decomposed" if decomposed else "")
            rows += _one(name, joint, inputs, exits, total)
    rows.append(Row("bytes of all with less", "KiB", total, (Bar(TORCH, LESS),)))
    return [*rows, *_budgets(), *_default(), *_long()]


def _one(name: str, joint: Any, inputs: Any, exits: int, total: dict[str, float]) -> list[Row]:
    theirs = peer.partition(copy.deepcopy(joint), inputs, exits)
    ours = _split(joint, exits)
    less = _split(joint, exits, memory="less")
    base = _flops(joint)
    figures = {TORCH: _saved(*theirs, exits), OURS: _saved(*ours, exits)}
    peaks = {TORCH: _peak(*theirs, exits), OURS: _peak(*ours, exits)}
    total[TORCH] += figures[TORCH]
    total[OURS] += _saved(*less, exits)
    repeated = max(_flops(*ours), _flops(*less)) - base
    milliseconds = in_turns(
        {
            TORCH: _timed(lambda: peer.partition(copy.deepcopy(joint), inputs, exits), joint),
            OURS: _timed(lambda: _split(joint, exits)),
        },
        ROUNDS,
    )
    return [
        Row(f"time, {name}", "ms", milliseconds, (Bar(TORCH, TIME),)),
        Row(f"saved, {name}", "KiB", figures, (Bar(TORCH, SAVED),)),
        Row(f"peak, {name}", "KiB", peaks, (Bar(TORCH, SAVED),)),
        Row(f"less: saved, {name}", "KiB", {TORCH: figures[TORCH], OURS: _saved(*less, exits)}),
        Row(
            f"less: peak, {name}", "KiB", {TORCH: peaks[TORCH], OURS: _peak(*less, exits)}, (Bar(TORCH, 1.0),)
        ),
        Row(f"matrix FLOPs again, {name}", "", {OURS: repeated}, (Difference(repeated, 0),)),
    ]


def _budgets() -> list[Row]:
    """torch at a budget, and we at the bytes that it reaches."""
    rows = []
    case = wide_gpt()
    joint, inputs, exits = peer.joint_graph(case.fresh(), case.inputs, decomposed=True)
    base, whole = _flops(joint), _saved(*_split(joint, exits), exits)
    for budget in (0.5, 0.25):
        theirs = peer.partition(copy.deepcopy(joint), inputs, exits, budget)
        reached = _saved(*theirs, exits) / whole

        split = partial(_split, joint, exits, memory_budget=reached)
        ours: tuple[fx.GraphModule, fx.GraphModule] = split()
        timed = in_turns(
            {
                TORCH: _timed(partial(_theirs, joint, inputs, exits, budget), joint),
                OURS: _timed(split),
            },
            1,
        )
        saved = {TORCH: _saved(*theirs, exits), OURS: _saved(*ours, exits)}
        flops = {TORCH: (_flops(*theirs) - base) / 1e3, OURS: (_flops(*ours) - base) / 1e3}
        rows += [
            Row(f"budget {budget}: time", "ms", timed, (Bar(TORCH, BUDGET_TIME),)),
            Row(f"budget {budget}: saved", "KiB", saved, (Bar(TORCH, 1.0),)),
            Row(f"budget {budget}: again", "kFLOP", flops, (Bar(TORCH, 1.0),)),
        ]
    return rows


def _default() -> list[Row]:
    """The default partition, counted with saved-tensor hooks."""
    rows = []
    for make in MODELS:
        for autocast in (False, True):
            figures = {}
            for name in (EAGER, OURS):
                case = make()
                model = case.fresh()
                compiled = (
                    model if name == EAGER else aheadgrad.compile(model, frontend="trace", backend="eager")
                )

                def forward(run: Any = compiled, on: bool = autocast, given: Any = case.inputs) -> Any:
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                        return run(*given)

                forward().backward()
                figures[name] = saved_bytes(forward, case.known(model)) / 1024
            subject = f"default: {case.name}" + (", autocast" if autocast else "")
            rows.append(Row(subject, "KiB", figures, (Bar(EAGER, 1.0),)))
    return rows


def _long() -> list[Row]:
    """Is the time linear in the number of nodes?"""
    rows = []
    for layers in (12, 48, 96):
        case = gpt(layers)
        joint, _, exits = peer.joint_graph(case.fresh(), case.inputs, decomposed=True)
        nodes = len(joint.graph.nodes)
        took = min(_timed(partial(_split, joint, exits))() for _ in range(2))
        rows.append(Row(f"{nodes} nodes", "µs/node", {OURS: 1e3 * took / nodes}))
    return rows


def _theirs(joint: Any, inputs: Any, exits: int, budget: float) -> Any:
    return peer.partition(copy.deepcopy(joint), inputs, exits, budget)


def _split(joint: Any, exits: int, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    return min_cut_rematerialization_partition(joint, None, num_fwd_outputs=exits, **options)


def _timed(work: Callable[[], Any], copied: Any = None) -> Callable[[], float]:
    """Milliseconds; without those of a copy that the work begins with."""

    def measure() -> float:
        start = time.perf_counter()
        if copied is not None:
            copy.deepcopy(copied)
        begun = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begun - (begun - start))

    return measure


def _kept(forward: fx.GraphModule, exits: int) -> list[fx.Node]:
    results: Any = forward.graph.output_node().args[0]
    return [n for n in results[exits:] if isinstance(n, fx.Node)]


def _saved(forward: fx.GraphModule, _: Any, exits: int) -> float:
    kept = set(map(_base, _kept(forward, exits)))
    return sum(_bytes(n) for n in kept if n.op != "placeholder") / 1024


def _peak(forward: fx.GraphModule, backward: fx.GraphModule, exits: int) -> float:
    known = {n.name: _base(n) for n in _kept(forward, exits)}
    held: dict[fx.Node, int] = {}
    counted: set[fx.Node] = set()
    for node in backward.graph.find_nodes(op="placeholder"):
        base = known.get(node.name)
        if base is None:
            held[node] = _bytes(node)
        elif base.op != "placeholder" and base not in counted:
            counted.add(base)
            held[node] = _bytes(base)
    return max(_peak_of(forward, {}), _peak_of(backward, held)) / 1024


def _peak_of(module: fx.GraphModule, held: dict[fx.Node, int]) -> int:
    nodes = list(module.graph.nodes)
    last = {_base(a): i for i, n in enumerate(nodes) for a in n.all_input_nodes}
    sizes, now = dict(held), sum(held.values())
    most = now
    for i, node in enumerate(nodes):
        if node.op == "call_function" and _base(node) is node:
            sizes[node] = _bytes(node)
            now += sizes[node]
            last.setdefault(node, i)
        most = max(most, now)
        for ended in [n for n in {*map(_base, node.all_input_nodes), node} if last.get(n) == i]:
            now -= sizes.pop(ended, 0)
    return most


def _base(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        first = schema.arguments[:1] if schema is not None else []
        if not (first and first[0].alias_info is not None and not first[0].alias_info.is_write):
            if node.target is operator.getitem and _base(node.args[0]) is not node.args[0]:  # type: ignore[arg-type]
                node = node.args[0]  # type: ignore[assignment]
                continue
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _flops(*modules: fx.GraphModule) -> float:
    """Of products, convolutions and attention, by torch's formulas; CPU attention has none."""
    total = 0
    for node in (n for m in modules for n in m.graph.nodes if n.op == "call_function"):
        packet = getattr(node.target, "overloadpacket", None)
        if packet in flop_registry:
            args: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
            total += flop_registry[packet](*args, **node.kwargs, out_val=node.meta["val"])
        elif "attention_for_cpu" in str(packet) and "backward" not in str(packet):
            given: Any = node.args[:3]
            q, k, v = (n.meta["val"].shape for n in given)
            total += 2 * math.prod(q) * (k[-2] + v[-1])
    return float(total)

"""From what is asked for (less memory, a budget) to the values that are saved, each with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from aheadgrad.options import Options
from aheadgrad.partition.budget import within
from aheadgrad.partition.min_cut import Cut, Network, Rules
from aheadgrad.partition.peak import peak_of_backward, read_by_the_peak
from aheadgrad.partition.table import Table
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Slot, Tangent
from aheadgrad.program.values import Port, Value
from aheadgrad.torchlayer.costs import Kind
from aheadgrad.torchlayer.subclasses import values_of

_STRICT = Rules()
_LESS = (Rules(Kind.SWEEPS, for_kernels=True), Rules(Kind.SWEEPS, for_kernels=True, across=0), _STRICT)
_ANYTHING = Rules(Kind.RANDOM, for_kernels=True, across=1 << 30)
_NOT_RANDOM = Rules(Kind.MATRIX, for_kernels=True, across=1 << 30)


@dataclass(frozen=True)
class Demands:
    """`cuts`: values may be computed again; with `less` also such as kernels read; `budget` is the part of
    what is saved otherwise that may be saved at most. `replays`: the backend can run random ops again,
    `fuses`: it makes one kernel of neighbours."""

    cuts: bool = False
    less: bool = False
    budget: float | None = None
    replays: bool = True
    fuses: bool = False


DEFAULT = Demands()


def demands_of(options: Options) -> Demands:
    if options.partition != "min_cut":
        return DEFAULT
    less, budget = options.memory == "less", options.memory_budget
    return Demands(True, less, budget, replays=options.replays, fuses=options.fuses)


def plan(table: Table, demands: Demands) -> Mapping[Value, str]:
    """The values to save, each with the reason why it is not computed again."""
    rules = _LESS if demands.less else (_STRICT,)
    candidates = [Network(table, replace(r, fused=demands.fuses)).solve() for r in rules]
    cut = candidates[0]
    if len(candidates) > 1:
        cut = min(candidates, key=lambda found: (simulated_peak(table, found), found.bytes))
    if demands.budget is not None and demands.budget < 1:
        anything = _ANYTHING if demands.replays else _NOT_RANDOM
        cut = _within(Network(table, anything), cut, demands.budget)
    return {v: table.why_kept(v.op) for v in cut.saved if v.op is not None}


def curve(table: Table, budgets: Iterable[float]) -> list[tuple[int, int]]:
    """For each budget, the bytes that are saved and the operations of matrix ops that are done again."""
    found = []
    whole, anything = Network(table, _STRICT).solve(), Network(table, _ANYTHING)
    for budget in budgets:
        cut = whole if budget >= 1 else _within(anything, whole, budget)
        found.append((cut.bytes, _flops_again(table, cut)))
    return found


def _within(network: Network, whole: Cut, budget: float) -> Cut:
    """The cut that repeats less: of all, or of those that do nothing again for the time until the peak.

    Each of the two families keeps its promises from budget to budget, and so does the cheaper one of both.
    """
    most = budget * whole.bytes
    cut = within(network, most)
    once = _over_by_the_peak(network, whole)
    if once.isdisjoint(cut.again):
        return cut
    other = within(network.without(once), most)
    fewer = _flops_again(network.table, other) <= _flops_again(network.table, cut)
    return other if fewer and other.bytes <= most else cut


def _over_by_the_peak(network: Network, whole: Cut) -> set[int]:
    """Products whose results (logits) the backward is done with when it takes the most memory. If they ran
    again they would be there by then, too: nobody would be helped."""
    table = network.table
    over = read_by_the_peak(*_backward_of(table, whole))
    todo = [v.op for v in whole.saved - over if v.op is not None]
    later = set(todo)
    while todo:
        made = {root.op for root in table.reads(table.ops[todo.pop()]) if root.op is not None} - later
        later |= made
        todo += made
    once = (network.again - later) | {v.op for v in over}
    return {i for i in network.again & once if table.kinds[i] >= Kind.MATRIX}


def _flops_again(table: Table, cut: Cut) -> int:
    return sum(table.flops(i) for i in cut.again if i in table.ahead)


def simulated_peak(table: Table, cut: Cut) -> int:
    """The memory that the backward takes at its worst moment with this cut."""
    return peak_of_backward(*_backward_of(table, cut))


def _backward_of(table: Table, cut: Cut) -> tuple[Program, tuple[Value, ...]]:
    """With this cut, and what of its inputs the forward makes."""
    inputs = {v for op in table.ops for v in op.uses if v.op is None and v not in table.tangents}
    ports = [Port(Slot(), v, f"saved_{k}") for k, v in enumerate((*cut.saved, *inputs))]
    ports += [Port(Tangent(Slot()), v, f"tangent_{k}") for k, v in enumerate(table.tangents)]
    results = [(Slot(), v) for g in table.gradients.grads for v in values_of(g) if type(v) is Value]
    program = table.cutter.cut("backward", ports, results, {table.gradients.phase}, late=True)
    return program, (*cut.saved, *table.tangents)

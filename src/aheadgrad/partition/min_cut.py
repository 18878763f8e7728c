"""The values to save, as a minimal cut.

Each op that may run again is a node, and so is each value. What is on the sink's side is there in the
backward: the values that it needs, the ops that run again for them, and the values that those need in turn.
A value is saved where the cut parts it from its op:

    source -> op      what running it again costs
    op -> value       its bytes
    value -> op       for ever: who runs again needs its arguments
    value -> sink     for ever: the backward needs it

An op that may not run again is the source itself. Inputs are there in any case and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from aheadgrad.partition.table import Table
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.costs import Kind, kind_of

_SOURCE, _SINK = 0, 1
_WIDEST = 1 << 29  # flows have 32 bits
_TRAFFIC = 0.01  # the bytes that a byte is worth that is read or written once more


@dataclass(frozen=True)
class Rules:
    """Which ops may run again: of kinds up to `kind`; for a kernel that does not fuse with its neighbours
    only if `for_kernels`; across so many ops that never do."""

    kind: Kind = Kind.FUSES
    for_kernels: bool = False
    across: int = 1


@dataclass(eq=False)
class Network:
    """What may be saved, and what may run again for it: roots by the op that makes them."""

    table: Table
    rules: Rules
    makes: dict[int, set[Value]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        table = self.table
        depths = self._depths()
        kernels = set() if self.rules.for_kernels else self._read_by_kernels()
        gaps: dict[int, int] = {}
        for root in table.needs:
            self._reach(root, 0, gaps)
        for i in range(len(table.ops) - 1, -1, -1):
            if i not in self.makes or not self._may(i, gaps[i], kernels):
                continue
            self.again.add(i)
            for root in table.reads(table.ops[i]):
                if root.op is not None:
                    self._reach(root, gaps[i] + (depths[i] > depths[root.op]), gaps)

    def _reach(self, root: Value, gap: int, gaps: dict[int, int]) -> None:
        if root.op is not None:
            self.makes.setdefault(root.op, set()).add(root)
            gaps[root.op] = max(gap, gaps.get(root.op, 0))

    def _may(self, i: int, gap: int, kernels: set[Value]) -> bool:
        kind, rules = self.table.kinds[i], self.rules
        if not self.table.avoided.isdisjoint(self.table.reads(self.table.ops[i])):
            return False
        if i not in self.table.ahead:
            return kind < Kind.RANDOM  # it runs once, here or there
        return kind <= rules.kind and gap <= rules.across and kernels.isdisjoint(self.makes[i])

    def _depths(self) -> list[int]:
        """How many ops that never run twice lie one behind the other before each."""
        depths: list[int] = []
        for op, kind in zip(self.table.ops, self.table.kinds, strict=True):
            deep = max((depths[v.op] for v in op.uses if v.op is not None), default=0)
            depths.append(deep + (kind > self.rules.kind))
        return depths

    def _read_by_kernels(self) -> set[Value]:
        needs = self.table.needs.items()
        return {root for root, ops in needs if any(kind_of(op.target) > Kind.FUSES for op in ops)}

    def cost(self, i: int) -> float:
        """What running an op again costs, in bytes; nothing if it would run once."""
        table = self.table
        if i not in table.ahead:
            return 0
        moved = sum(root.type.bytes for root in table.reads(table.ops[i]))
        return _TRAFFIC * float(moved + sum(v.type.bytes for v in table.ops[i].values))

    def solve(self, price: float = 0.0) -> set[Value]:
        """The roots to save. `price`: the bytes that a FLOP is worth."""
        number: dict[Value | int, int] = {}
        edges: list[tuple[int, int, float]] = []

        def node(of: Value | int) -> int:
            return number.setdefault(of, len(number) + 2)

        for root in self.table.needs:
            if root.op is not None:
                edges.append((node(root), _SINK, np.inf))
        for i, roots in self.makes.items():
            op = node(i) if i in self.again else _SOURCE
            edges += [(op, node(root), root.type.bytes) for root in roots]
            if i in self.again:
                edges.append((_SOURCE, op, self.cost(i) + price * self.table.flops(i)))
                reads = self.table.reads(self.table.ops[i])
                edges += [(node(root), op, np.inf) for root in reads if root.op is not None]
        there = _sinks_side(edges, len(number) + 2)
        apart = (v for v, n in number.items() if type(v) is Value and n in there)
        return {v for v in apart if v.op not in self.again or number[v.op] not in there}


def _sinks_side(edges: list[tuple[int, int, float]], count: int) -> set[int]:
    """The nodes behind the minimal cut that is nearest to the sink: where the fewest ops run again."""
    if not edges:
        return set()
    rows, columns, sizes = zip(*edges, strict=True)
    widths = np.array(sizes, dtype=float)
    known = np.isfinite(widths)
    unit = max(float(widths[known].sum()) / _WIDEST, 1e-9)
    widths[known] = np.ceil(widths[known] / unit)
    widths[~known] = 2 * _WIDEST
    graph = csr_array((widths.astype(np.int32), (rows, columns)), shape=(count, count))
    left = (graph - maximum_flow(graph, _SOURCE, _SINK).flow).tocsr()
    left.data = (left.data > 0).astype(np.int8)
    left.eliminate_zeros()
    return set(breadth_first_order(left.T.tocsr(), _SINK, return_predecessors=False).tolist())

"""The values to save, as a minimal cut.

Each op that may run again is a node, and so is each value. What is on the sink's side is there in the
backward: the values that it needs, the ops that run again for them, and the values that those need in turn.
A value is saved where the cut parts it from its op:

    source -> op      what running it again costs
    op -> value       its bytes, and a little more if it would not be written to memory otherwise
    value -> op       for ever: who runs again needs its arguments
    value -> sink     for ever: the backward needs it

An op that may not run again is the source itself. Inputs are there in any case and are left out. What rests
on no input (ranges, constants) is made again for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from aheadgrad.partition.table import Table
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.costs import Kind, is_reduction, kind_of
from aheadgrad.torchlayer.replay import state_bytes

_SOURCE, _SINK = 0, 1
_WIDEST = 1 << 29  # flows have 32 bits
_TRAFFIC = 0.01  # the bytes that a byte is worth that is read or written once more
_REDUCED = 0.19  # ... by a reduction, which reads much to give little
_WRITTEN = 0.25  # ... that is written only to be saved
_ORDER = 1e-3  # what arithmetic at the end weighs more than at the beginning: it tells like layers apart


@dataclass(frozen=True)
class Rules:
    """Which ops may run again: of kinds up to `kind`; for a kernel that does not fuse with its neighbours
    only if `for_kernels`; across so many ops that never do. `fused`: neighbours become one kernel, which
    writes only what others read."""

    kind: Kind = Kind.FUSES
    for_kernels: bool = False
    across: int = 1
    fused: bool = False


@dataclass(frozen=True, eq=False)
class Cut:
    """The roots to save, the ops that run again, and the bytes that are saved (states of generators too)."""

    saved: frozenset[Value]
    again: frozenset[int]
    bytes: int


@dataclass(eq=False)
class Network:
    """What may be saved, and what may run again for it: roots by the op that makes them."""

    table: Table
    rules: Rules
    barred: frozenset[int] = frozenset()
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
                if (made := table.maker(root)) is not None:
                    self._reach(root, gaps[i] + (depths[i] > depths[made]), gaps)

    def _reach(self, root: Value, gap: int, gaps: dict[int, int]) -> None:
        if (made := self.table.maker(root)) is not None:
            self.makes.setdefault(made, set()).add(root)
            gaps[made] = max(gap, gaps.get(made, 0))

    def _may(self, i: int, gap: int, kernels: set[Value]) -> bool:
        kind, rules = self.table.kinds[i], self.rules
        if i in self.table.again:
            return True
        wish = self.table.wishes.get(i)
        if self.table.ops[i].region is not None and i in self.table.ahead:
            return kind is Kind.VIEW
        if wish is not None and wish.saves and (wish.must or rules.kind < Kind.RANDOM):
            return False  # only a budget overrules what is merely preferred
        if wish is not None and not wish.saves:
            return kind is not Kind.NEVER
        if not self.table.avoided.isdisjoint(self.table.reads(self.table.ops[i])):
            return False
        if i not in self.table.ahead:
            return kind < Kind.RANDOM  # it runs once, here or there
        if i in self.barred:
            return False
        return kind <= rules.kind and gap <= rules.across and kernels.isdisjoint(self.makes[i])

    def _depths(self) -> list[int]:
        """How many ops that never run twice lie one behind the other before each."""
        depths: list[int] = []
        for op, kind in zip(self.table.ops, self.table.kinds, strict=True):
            deep = max((depths[v.op] for v in op.uses if v.op is not None), default=0)
            depths.append(deep + (kind > self.rules.kind))
        return depths

    def _read_by_kernels(self) -> set[Value]:
        """What kernels of their own read in the backward, but for what is made from nothing."""
        needs = [(root, ops) for root, ops in self.table.needs.items() if root.op not in self.table.constant]
        return {root for root, ops in needs if any(kind_of(op.target) > Kind.FUSES for op in ops)}

    def without(self, ops: set[int]) -> Network:
        """The same, but these ops do not run again."""
        return Network(self.table, self.rules, barred=frozenset(ops))

    def state(self, i: int) -> int:
        """The bytes that are saved so that a random op gives the same numbers again."""
        random = self.table.kinds[i] is Kind.RANDOM and i in self.table.ahead
        return state_bytes(next(self.table.ops[i].values).type.device) if random else 0

    def arithmetic(self, i: int) -> float:
        """Operations; of the same layer over and over, those of the first count least."""
        return self.table.flops(i) * (1 + _ORDER * i / len(self.table.ops))

    def moved(self, i: int) -> int:
        """The bytes that an op reads and writes if it runs again; none if it would run once."""
        table = self.table
        if i not in table.ahead:
            return 0
        read = sum(root.type.bytes for root in table.reads(table.ops[i]))
        return int(read + sum(v.type.bytes for v in table.ops[i].values))

    @cached_property
    def _edges(self) -> _Edges:
        """As arrays: one solution is wanted after the other."""
        number: dict[Value | int, int] = {}
        edges: list[tuple[int, int, float, float]] = []  # from, to, width, and what a price adds to it

        def node(of: Value | int) -> int:
            return number.setdefault(of, len(number) + 2)

        for root in self.table.needs:
            if self.table.maker(root) is not None:
                edges.append((node(root), _SINK, np.inf, 0))
        for i, roots in self.makes.items():
            op = node(i) if i in self.again else _SOURCE
            for root in roots:
                edges.append((op, node(root), self._width(i, root), 0))
            if i in self.again and i not in self.table.constant:
                moved = self.moved(i)
                reduces = not self.rules.for_kernels and is_reduction(self.table.ops[i].target)
                weight = _REDUCED if reduces else _TRAFFIC
                edges.append(
                    (_SOURCE, op, weight * moved + self.state(i), _TRAFFIC * moved + self.arithmetic(i))
                )
                reads = self.table.reads(self.table.ops[i])
                made = (root for root in reads if self.table.maker(root) is not None)
                edges += [(node(root), op, np.inf, 0) for root in made]
        return _Edges(number, edges)

    def _width(self, i: int, root: Value) -> float:
        """What saving a value costs, in bytes."""
        if i in self.table.constant and i in self.again:
            return np.inf
        if root not in self.table.outside and i in self.table.again:
            return np.inf
        more = (
            _WRITTEN * self._written_for_nothing(i)
            if self.rules.fused and root not in self.table.written
            else 0
        )
        return root.type.bytes * (1 + more)

    def _written_for_nothing(self, i: int) -> float:
        """The part of a write that is lost: none of it where readers would otherwise read two values of that
        size."""
        table = self.table
        made = sum(v.type.bytes for v in table.ops[i].values)
        if not made or is_reduction(table.ops[i].target):
            return 1.0
        reads = (v for v in table.reads(table.ops[i]) if table.maker(v) is None or v in table.written)
        return min(1.0, max(0.0, 2 - sum(v.type.bytes for v in reads) / made))

    def solve(self, price: float = 0.0) -> Cut:
        """The minimal cut. `price`: the bytes that an operation is worth."""
        edges = self._edges
        there = edges.sinks_side(price)
        again = frozenset(i for i in self.again if edges.number[i] in there)
        present = (v for v, n in edges.number.items() if type(v) is Value and n in there)
        saved = frozenset(v for v in present if v.op not in again)
        states = sum(self.state(i) for i in again)
        return Cut(saved, again, states + sum(v.type.bytes for v in saved))


class _Edges:
    def __init__(self, number: dict[Value | int, int], edges: list[tuple[int, int, float, float]]) -> None:
        self.number = number
        self.rows, self.columns, widths, priced = np.array(edges or np.empty((0, 4)), dtype=float).T
        self.widths, self.priced = widths, priced
        sizes = widths[np.isfinite(widths) & (self.rows != _SINK) & (priced == 0)]
        self.total = float(sizes.sum())  # no flow is wider than all that might be saved

    def sinks_side(self, price: float) -> set[int]:
        """The nodes behind the minimal cut that is nearest to the sink: where the fewest ops run again."""
        if not self.total:
            return set(self.number.values())
        widths = np.minimum(self.widths + price * self.priced, 2 * self.total)
        scaled = np.ceil(widths * (_WIDEST / self.total)).astype(np.int32)
        count = len(self.number) + 2
        shape = (self.rows.astype(np.int32), self.columns.astype(np.int32))
        graph = csr_array((scaled, shape), shape=(count, count))
        left = (graph - maximum_flow(graph, _SOURCE, _SINK).flow).tocsr()
        left.data = (left.data > 0).astype(np.int8)
        left.eliminate_zeros()
        return set(breadth_first_order(left.T.tocsr(), _SINK, return_predecessors=False).tolist())

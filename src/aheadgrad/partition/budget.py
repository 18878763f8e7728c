"""As little recomputed arithmetic as a budget of bytes allows.

Cuts at rising prices of an operation save more and more and run fewer and fewer ops again, each a part of
those before: a smaller budget never saves more, a larger one never does more again. The budget lies between
two neighbours in this family. Where they differ in several matrix ops, an integer program finds which of
these run again; everything else is a cut in it, which its linear part solves exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from aheadgrad.partition.min_cut import Cut, Network
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.costs import Kind

_STEPS = 60  # of the search for the price that just meets a budget
_MOST_CHOICES, _MOST_NODES = 300, 2000  # of an integer program
_TIE = 1e-4  # all bytes beside all arithmetic: they decide between equals


def within(network: Network, most: float) -> Cut:
    """The cut that saves at most so many bytes, if that is possible at all."""
    less, more = _neighbours(network, most)
    if more is None:
        return less
    free = [i for i in sorted(less.again - more.again) if network.table.kinds[i] >= Kind.MATRIX]
    if 1 < len(free) <= _MOST_CHOICES and less.bytes <= most:
        dear = {i for i in network.again if network.table.kinds[i] >= Kind.MATRIX}
        barred = dear - less.again
        again = _chosen(network.without(barred), free, most)
        if again is not None:
            less, _ = _neighbours(network.without(barred | set(free) - again), most)
    return less


def _neighbours(network: Network, most: float) -> tuple[Cut, Cut | None]:
    """The cut at the highest price that meets the budget, and one at a hardly higher one, which does not."""
    low, high = 0.0, 1e-9
    less, more = network.solve(), None
    while high < 1e15 and less.bytes <= most:
        found = network.solve(high)
        if found.bytes > most:
            more = found
            break
        less, low, high = found, high, high * 1e3
    for _ in range(_STEPS):
        price = math.sqrt(low * high) if low else high / 1e3
        if more is None or less.again == more.again or high <= low * (1 + 1e-7) or price < 1e-15:
            break
        found = network.solve(price)
        if found.bytes <= most:
            less, low = found, price
        else:
            more, high = found, price
    return less, more


def _chosen(network: Network, free: list[int], most: float) -> set[int] | None:
    """Which of the free ops run again. None if that takes too long to find out."""
    others = sorted(network.again - set(free))
    values = [v for roots in network.makes.values() for v in roots]
    choices: list[int | Value] = [*free, *others, *values]
    column = {of: k for k, of in enumerate(choices)}
    cells: list[tuple[int, int, float]] = []
    needed: list[float] = []
    for value, by in _at_hand(network):
        cells.append((len(needed), column[value], 1.0))
        if value.op is not None and value.op in column:
            cells.append((len(needed), column[value.op], 1.0))
        if by is not None:
            cells.append((len(needed), column[by], -1.0))
        needed.append(float(by is None))
    sizes = np.array([network.state(i) for i in (*free, *others)] + [v.type.bytes for v in values], float)
    cells += [(len(needed), int(k), sizes[k]) for k in np.flatnonzero(sizes)]
    where, which, weights = zip(*cells, strict=True)
    costs = np.zeros(len(column))
    costs[: len(free)] = [1.0 + network.arithmetic(i) for i in free]
    found = milp(
        costs / costs.sum() + _TIE * sizes / sizes.sum(),
        integrality=np.arange(len(column)) < len(free),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            csr_array((weights, (where, which)), shape=(len(needed) + 1, len(column))),
            np.array([*needed, -np.inf]),
            np.array([np.inf] * len(needed) + [most]),
        ),
        options={"node_limit": _MOST_NODES},
    )
    return {i for i in free if found.x[column[i]] > 0.5} if found.status == 0 else None


def _at_hand(network: Network) -> Iterator[tuple[Value, int | None]]:
    """What has to be saved or computed again: in any case, or if a certain op runs again."""
    for root in network.table.needs:
        if root.op is not None:
            yield root, None
    for i in network.again:
        for root in network.table.reads(network.table.ops[i]):
            if root.op is not None:
                yield root, i

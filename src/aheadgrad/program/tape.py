"""A tape: all that a recording wrote down, as values. Programs are cut out of it (`cut`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from aheadgrad.program.names import Naming
from aheadgrad.program.values import FreshCopy, Op, Value

_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True, eq=False)
class Tape:
    """Ops in the order in which they ran: of the forward, and of every backward that was recorded by now.

    `settled` tells how many there were when the inputs had their final values. `makers` has, for each symbol
    that an op makes (`x.item()`, the size of `x[mask]`), the numbers of those ops. `copies` are inputs that a
    program of this tape copies first. `parts_first`: in graphs, parts of a result stand right after the op.
    """

    ops: tuple[Op, ...]
    settled: int
    makers: Mapping[Any, tuple[int, ...]]
    sized: bool
    naming: Naming = field(repr=False)
    copies: Mapping[Value, FreshCopy] = field(default_factory=dict)
    parts_first: bool = False

    @cached_property
    def has_regions(self) -> bool:
        return any(op.region is not None for op in self.ops)

    def maker(self, symbol: Any, phases: set[str] | None) -> int:
        """Which op makes a symbol, as seen from these phases: one of their own comes first."""
        makers = self.makers[symbol]
        for wanted in (phases or set(), {"forward"}):
            for i in makers:
                if self.ops[i].phase in wanted:
                    return i
        return makers[0]

    def of(self, value: Value) -> Op | None:
        """The op that made a value; None for an input."""
        return None if value.op is None else self.ops[value.op]

    def is_view(self, value: Value) -> bool:
        op = self.of(value)
        return op is not None and op.viewed is not None

    def source(self, value: Value) -> Value:
        """Looks through detach ops that autograd adds while it records a backward."""
        while value.op is not None:
            op = self.ops[value.op]
            if op.target is not _DETACH or op.phase == "forward":
                break
            value = op.args[0]
        return value

    def views_back(self, value: Value) -> Iterator[Value]:
        """A value, what it is a view of, what that is a view of, and so on."""
        found: Value | None = value
        while found is not None:
            yield found
            op = self.of(found)
            found = None if op is None else op.viewed

    def view_source(self, value: Any) -> Any:
        """The value that a chain of view ops starts from."""
        if type(value) is not Value:
            return value
        *_, first = self.views_back(value)
        return first

    def name_of(self, value: Value) -> str:
        """What a value is called where it is made; nothing for an input that is used as it is."""
        copy = self.copies.get(value)
        return copy.name if copy is not None else value.name

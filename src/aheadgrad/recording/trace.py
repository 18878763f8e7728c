"""The trace: a flat list of what ran, from which any number of graphs can be cut.

Ops are recorded as they happen, with fake tensors as arguments. Nothing is an FX node until a
graph is asked for, so ops that no result needs cost next to nothing.

    trace.add(aten.mul.Tensor, (x, 2), {}, y)
    trace.producer(y)        # -> Made(record=0, part=None)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from aheadgrad.program.effects import has_effect
from aheadgrad.program.values import Origin, Region
from aheadgrad.torchlayer.autograd import AutogradNode
from aheadgrad.torchlayer.symbols import expression, free_symbols, is_symbolic
from aheadgrad.torchlayer.unbacked import sizes_in


class Made(NamedTuple):
    """Which record made a value, and which part of its result it is (None: all of it)."""

    record: int
    part: int | None


@dataclass(slots=True, eq=False)
class Record:
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    phase: str
    origin: Origin | None
    meta: dict[str, Any] | None = None
    keep: bool = False
    node: AutogradNode | None = None  # whose backward it ran in
    region: Region | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        found: list[Tensor] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(tuple(self.kwargs.values()), found)
        return found


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


class Trace:
    """Records in the order they ran; values are identified by the fake tensor objects themselves."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.phase = "forward"
        self.backwards = 0  # how many backwards were recorded
        self.settled = 0  # how many records there were when the inputs had their final values
        self.read_off = 0  # ... and when the gradients of the last backward had theirs
        self.constants: dict[int, Tensor] = {}
        self.sized = False  # can a result have a size that values decide?
        self.numbers: dict[Any, list[int]] = {}  # who makes a symbol: `x.item()`, the size of `x[mask]`
        self._made: dict[int, Made] = {}

    def add(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        origin: Origin | None = None,
        meta: dict[str, Any] | None = None,
        node: AutogradNode | None = None,
        region: Region | None = None,
    ) -> None:
        index = len(self.records)
        record = Record(target, args, kwargs, out, self.phase, origin, meta)
        record.keep = has_effect(target)
        record.node, record.region = node, region
        self.records.append(record)
        if self.sized:
            self._note_sizes(record, index)
        if isinstance(out, Tensor):
            self._made.setdefault(id(out), Made(index, None))
        elif is_symbolic(out):
            self.numbers.setdefault(expression(out), []).append(index)
        elif isinstance(out, list | tuple):
            for part, value in enumerate(out):
                if isinstance(value, Tensor):
                    self._made.setdefault(id(value), Made(index, part))

    def _note_sizes(self, record: Record, index: int) -> None:
        parts = record.out if isinstance(record.out, list | tuple) else (record.out,)
        found = set().union(*(sizes_in(p) for p in parts if isinstance(p, Tensor)))
        for symbol in found - free_symbols([list(record.args), record.kwargs]) if found else ():
            self.numbers.setdefault(symbol, []).append(index)

    def save_from(self, index: int) -> None:
        """A policy saves the results of these records."""
        for record in self.records[index:]:
            if record.region is not None:
                record.region = record.region._replace(saves=True)

    def rewind(self, length: int) -> None:
        """Forgets all records from `length` on."""
        for record in self.records[length:]:
            parts = record.out if isinstance(record.out, list | tuple) else (record.out,)
            for value in parts:
                if self._made.get(id(value), Made(-1, None)).record >= length:
                    del self._made[id(value)]
        kept = {symbol: [i for i in makers if i < length] for symbol, makers in self.numbers.items()}
        self.numbers = {symbol: makers for symbol, makers in kept.items() if makers}
        del self.records[length:]

    def producer(self, value: Tensor) -> Made | None:
        """Which record made this value; None for an input."""
        return self._made.get(id(value))

    def constant(self, value: Tensor) -> None:
        """A real tensor that stands in the graph itself."""
        self.constants[id(value)] = value

"""Sizes that values decide: what a recording assumed of them without being asked to check it.

Such a size has no number while it is recorded, and torch then takes the way of a large one: it assumes that
`x[mask]` is neither empty nor a single row, and that two sizes that meet are equal. At run time a kernel
will say so if they are not, unless it can make sense of it: a single row is broadcast, squeezed away, or
contiguous in any order. So each recorded op is asked once more, with sizes 0 and 1; what then has another
shape is left to eager, and so is what would share other memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.recording.records import Record
from aheadgrad.recording.told_by_name import COPIES_ALWAYS
from aheadgrad.torchlayer import functional, random
from aheadgrad.torchlayer.dispatch import OpOverload
from aheadgrad.torchlayer.fake import quiet_logs
from aheadgrad.torchlayer.kernels import for_real
from aheadgrad.torchlayer.symbols import typical
from aheadgrad.torchlayer.unbacked import (
    Demands,
    fakes_of_size,
    sample,
    sizes_in,
    sizes_of,
    strides_agree,
)

if TYPE_CHECKING:
    from aheadgrad.recording.session import Session

_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy that eager does not make for some sizes, and what had been written to by then."""

    of: Tensor
    made: Tensor
    writes: list[tuple[int, int]]


class OpenSizes:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.checked = 0  # how many records were
        self.demands = Demands(session.mode)
        self.copies: list[_Copy] = []  # what may share memory, for some sizes
        self.clones: set[int] = set()  # ids of the values in which they were recorded

    def check(self) -> None:
        """After a run or a backward was recorded."""
        trace = self.session.trace
        new, self.checked = trace.records[self.checked :], len(trace.records)
        if not trace.numbers:
            return
        equal = [*self.demands.equalities(), *self.demands.replaced(trace.numbers)]
        if not all(map(self._is_forced, equal)):
            raise FallbackError("a size that values decide has to be equal to another one")
        makers = {i for made in trace.numbers.values() for i in made}
        for i, record in enumerate(new, self.checked - len(new)):
            if isinstance(record.target, OpOverload) and not isinstance(record.out, torch.SymInt):
                if i in makers:
                    _check_kernel(record)
                elif any(map(sizes_in, record.tensors())):
                    for n in (0, 1):
                        self._check_size(record, n)

    def _is_forced(self, relation: Any) -> bool:
        """Has the forward's kernel seen to it?

        `x[mask] = v` has, with a `v` of several rows: a backward finds as many in the mask.
        """
        if len(relation.args) != 2:
            return False
        symbol, number = sorted(relation.args, key=lambda part: bool(part.is_number))
        makers = self.session.trace.numbers.get(symbol, ())
        in_backward = bool(makers) and all(self.session.trace.records[i].phase != "forward" for i in makers)
        return in_backward and bool(number.is_number) and int(number) > 1

    def _check_size(self, record: Record, n: int) -> None:
        expected = sizes_of(record.out, n)
        try:
            with functional.outside(), quiet_logs(), self.session.mode, torch.no_grad():
                args, kwargs = fakes_of_size(self.session.mode, (record.args, record.kwargs), n)
                found = sizes_of(record.target(*args, **kwargs), n)
        except Exception:
            return  # so eager raises, too
        if found != expected:
            raise FallbackError(
                f"{record.target} has a result of another shape when a size that values decide is {n}"
            )

    def note_copy(self, func: Any, given: Any, out: Any, made: list[Record]) -> None:
        """After a call that may have copied because a size is not known (`x[mask].t().contiguous()`)."""
        if not self.session.trace.numbers or getattr(func, "__name__", "") in COPIES_ALWAYS:
            return
        if not isinstance(out, Tensor) or not isinstance(given, Tensor) or out.dtype != given.dtype:
            return
        copies = [r for r in made if r.target is _CLONE and sizes_in(r.out)]
        if copies and typical(out.numel()) == typical(given.numel()):
            self.copies.append(_Copy(given, out, self._writes(given, out)))
            self.clones.update(id(r.out) for r in copies)

    def _writes(self, *tensors: Tensor) -> list[tuple[int, int]]:
        return [(functional.version_of(t), self.session.ledger.memory(t).writes) for t in tensors]

    def check_memory(self, outputs: list[Any]) -> None:
        """A copy that eager does not make for some sizes must not be told from what it was copied from."""
        tensors = [t for t in outputs if isinstance(t, Tensor)]
        leaving = set(map(functional.storage_key, tensors))
        for copy in self.copies:
            written = self._writes(copy.of, copy.made) != copy.writes
            if written or functional.storage_key(copy.made) in leaving:
                raise FallbackError("whether memory is shared depends on a size that values decide")
        values = [functional.unwrap(t) for t in tensors]
        for n in (0, 1) if self.copies else ():
            try:
                same = self._strides(values, n, copied=True) == self._strides(values, n, copied=False)
            except Exception:  # there is no telling
                same = False
            if not same:
                raise FallbackError("strides of a result depend on a size that values decide")

    def _strides(self, values: list[Any], n: int, *, copied: bool) -> list[Any]:
        """Of results, where sizes that values decide are `n`: with and without copies that eager may save."""
        made: dict[int, Tensor] = {}
        makers = {i for some in self.session.trace.numbers.values() for i in some}
        try:
            with for_real(), random.preserved():
                for i, record in enumerate(self.session.trace.records):
                    if not isinstance(record.target, OpOverload) or i in makers:
                        continue
                    if not any(id(t) in made or sizes_in(t) for t in record.tensors()):
                        continue
                    args, kwargs = sample((record.args, record.kwargs), "zeros", n, made)
                    saved = id(record.out) in self.clones and not copied and args[0].is_contiguous()
                    out = args[0] if saved else record.target(*args, **kwargs)
                    made.update((id(a), b) for a, b in record.results(out) if isinstance(b, Tensor))
        except RuntimeError:
            return []  # eager raises, too
        return [made[id(v)].stride() for v in values if id(v) in made]


def _check_kernel(record: Record) -> None:
    """Of an op whose results have sizes that values decide: are their strides as the recording believes?"""
    for fill in ("different", "zeros"):
        try:
            with for_real():
                args, kwargs = sample((record.args, record.kwargs), fill)
                out = record.target(*args, **kwargs)
        except Exception:  # these values are no good for this op
            continue
        if not strides_agree(record.out, out):
            raise FallbackError(f"strides of {record.target} are not known")
        return

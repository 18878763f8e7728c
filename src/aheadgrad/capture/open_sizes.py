"""Sizes that values decide: what a recording assumed of them without being asked to check it.

Such a size has no number while it is recorded, and torch then takes the way of a large one: it assumes that
`x[mask]` is neither empty nor a single row, and that two sizes that meet are equal. At run time a kernel
will say so if they are not, unless it can make sense of it: a single row is broadcast, squeezed away, or
contiguous in any order. So each recorded op is asked once more, with sizes 0 and 1; what then has another
shape is left to eager, and so is what would share other memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.capture.trace import Record
from aheadgrad.errors import FallbackError
from aheadgrad.torchlayer import functional
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
    from aheadgrad.capture.session import Session

_CLONE = torch.ops.aten.clone.default
_COPIES = {"clone", "__deepcopy__", "__copy__"}


class OpenSizes:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.checked = 0  # how many records were
        self.demands = Demands(session.mode)
        self.copies: list[tuple[Tensor, Tensor]] = []  # what may share memory, for some sizes

    def check(self) -> None:
        """After a run or a backward was recorded."""
        trace = self.session.trace
        new, self.checked = trace.records[self.checked :], len(trace.records)
        if not trace.numbers:
            return
        unequal = self.demands.equalities()
        if unequal:
            raise FallbackError(f"a size that values decide has to be equal to another one: {unequal[0]}")
        given = self.demands.replaced(trace.numbers)
        if given:
            raise FallbackError(f"a size that values decide can only be one: {given[0]}")
        makers = {i for made in trace.numbers.values() for i in made}
        for i, record in enumerate(new, self.checked - len(new)):
            if isinstance(record.target, OpOverload) and not isinstance(record.out, torch.SymInt):
                if i in makers:
                    _check_kernel(record)
                elif any(map(sizes_in, record.tensors())):
                    for n in (0, 1):
                        self._check_size(record, n)

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
        if not self.session.trace.numbers or getattr(func, "__name__", "") in _COPIES:
            return
        if not isinstance(out, Tensor) or not isinstance(given, Tensor) or out.dtype != given.dtype:
            return
        copied = any(r.target is _CLONE and sizes_in(r.out) for r in made)
        if copied and typical(out.numel()) == typical(given.numel()):
            self.copies.append((given, out))

    def check_memory(self, outputs: list[Any]) -> None:
        """A copy that eager does not make for some sizes must not be told from what it was copied from."""
        leaving = {functional.storage_key(t) for t in outputs if isinstance(t, Tensor)}
        for pair in self.copies:
            keys = set(map(functional.storage_key, pair))
            if functional.storage_key(pair[1]) in leaving or keys & self.session.layouts.touched:
                raise FallbackError("whether memory is shared depends on a size that values decide")


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

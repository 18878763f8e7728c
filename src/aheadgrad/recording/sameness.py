"""Values that are the same because the same op made them of the same values.

`x[x > 0] * y[x > 0]` has two masks. What is computed twice is recorded twice, but where values decide on
a size it is good to know that both decide the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aheadgrad.recording.records import Trace
from aheadgrad.torchlayer.dispatch import OpOverload
from aheadgrad.torchlayer.symbols import expression, is_symbolic

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Sameness:
    """Numbers the values of a trace: equal numbers are equal values."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.looked_at = 0
        self.first: dict[int, Tensor] = {}  # by id of a value: the first that is the same
        self.known: dict[Any, Any] = {}  # by op and arguments: the first results

    def first_of(self, value: Tensor) -> Tensor:
        """The first value that is the same as this one."""
        records = self.trace.records
        if self.looked_at > len(records):  # some were taken back
            self.looked_at, self.first, self.known = 0, {}, {}
        for record in records[self.looked_at :]:
            if not record.keep and isinstance(record.target, OpOverload):
                self._look_at(record)
        self.looked_at = len(records)
        return self.first.get(id(value), value)

    def _look_at(self, record: Any) -> None:
        try:
            key = (record.target, self._key(record.args), self._key(tuple(record.kwargs.items())))
            out = self.known.setdefault(key, record.out)
        except TypeError:  # an argument of another kind
            return
        if isinstance(out, Tensor) and out is not record.out:
            self.first[id(record.out)] = self.first.get(id(out), out)

    def _key(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return id(self.first.get(id(value), value))
        if isinstance(value, list | tuple):
            return tuple(map(self._key, value))
        if is_symbolic(value):
            return expression(value)
        if not isinstance(value, _PLAIN):
            raise TypeError
        return (type(value), value)

"""Values of recorded tensors, as far as they are known while recording.

A recorded tensor has no value, but some can be told all the same: what is computed from constants alone
(`torch.tensor(3).item()`), and, when a backward is recorded in the very moment that it runs, whatever
follows from the tensors at hand. The ops of the trace that lead to such a tensor are run for real.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.errors import DataDependentError
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable, is_random
from aheadgrad.torchlayer.fake import FakeTensor, FakeTensorMode
from aheadgrad.torchlayer.kernels import for_real
from aheadgrad.torchlayer.symbols import constant_of, is_symbolic

if TYPE_CHECKING:
    from aheadgrad.recording.records import Record, Trace

_LARGEST = 1 << 16  # elements of a constant that is worth computing


class Unknown(Exception):
    """The value rests on something that has none while recording."""


class ValueNeeded(DataDependentError):
    """A value is asked for; what to do instead is told where it is known who asks."""


class Values:
    """Finds values in one trace. `at_hand` are known by the id of what stands for them."""

    def __init__(self, trace: Trace, mode: FakeTensorMode) -> None:
        self.trace = trace
        self.mode = mode
        self.at_hand: dict[int, Any] | None = None
        self.tangents: list[Tensor] | None = None  # of the backward that is recorded next
        self._found: dict[int, Tensor] = {}

    @contextmanager
    def known_to_be(self, pairs: list[tuple[Any, Any]], tangents: list[Tensor]) -> Iterator[None]:
        """Inside, these values are at hand: traced and real ones, and the tangents of one backward."""
        before = self.at_hand, self.tangents, self._found
        self.at_hand = {id(traced): real for traced, real in pairs}
        self.tangents, self._found = tangents, {}
        try:
            yield
        finally:
            self.at_hand, self.tangents, self._found = before

    def meet(self, stand_ins: list[Tensor]) -> None:
        """The tangents of a backward have been made: if theirs are the values at hand, they are known now."""
        if self.tangents is not None and self.at_hand is not None:
            self.at_hand.update({id(t): real for t, real in zip(stand_ins, self.tangents, strict=True)})
            self.tangents = None

    def of(self, traced: Tensor) -> Tensor:
        """The value of a traced tensor, or `Unknown`."""
        if type(traced) is not Tensor or not functional.is_wrapped(traced):
            raise Unknown
        fake = functional.latest(traced)
        with for_real():
            return self._value(fake)

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives whose result depends on values: numbers, or placeholders of the right size."""
        if not isinstance(func, OpOverload) or is_mutable(func) or is_random(func):
            raise Unknown
        with for_real():
            given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, FakeTensor)]
            if not given:
                raise Unknown
            args, kwargs = pytree.tree_map(self._real, (args, kwargs))
            return pytree.tree_map(self._placeholder, func(*args, **kwargs))

    def _placeholder(self, out: Any) -> Any:
        if not isinstance(out, Tensor):
            return out
        room = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="meta")
        return FakeTensor(self.mode, room, out.device)

    def _real(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self._value(value)
        if is_symbolic(value):
            number = constant_of(value)
            if number is None:
                raise Unknown
            return number
        return value

    def _value(self, wanted: FakeTensor) -> Tensor:
        """Depth first, without recursion: a trace can be long."""
        stack = [wanted]
        while stack:
            fake = stack[-1]
            if self._known(fake) is not None:
                stack.pop()
                continue
            record = self._maker(fake)
            missing = [t for t in record.tensors() if isinstance(t, FakeTensor) and self._known(t) is None]
            if missing:
                stack.extend(missing)
                continue
            self._run(record)
            stack.pop()
        found = self._known(wanted)
        assert found is not None
        return found

    def _known(self, fake: FakeTensor) -> Tensor | None:
        if self.at_hand is not None and id(fake) in self.at_hand:
            real: Tensor = self.at_hand[id(fake)]
            return real
        return self._found.get(id(fake))

    def _maker(self, fake: FakeTensor) -> Record:
        made = self.trace.producer(fake)
        if made is None:
            raise Unknown
        record = self.trace.records[made.record]
        target = record.target
        if not isinstance(target, OpOverload) or is_mutable(target) or is_random(target):
            raise Unknown
        if self.at_hand is None and (is_symbolic(fake.numel()) or math.prod(fake.size()) > _LARGEST):
            raise Unknown
        return record

    def _run(self, record: Record) -> None:
        args, kwargs = pytree.tree_map(self._real, (record.args, record.kwargs))
        for fake, real in record.results(record.target(*args, **kwargs)):
            if isinstance(fake, FakeTensor):
                self._found[id(fake)] = real

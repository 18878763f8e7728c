"""The backward of one component: a program per pattern of tangents, compiled when first seen.

A pattern says which tangents exist and how they are laid out. Missing tangents stay missing:
their branch is not computed, and inputs that only they lead to get `None`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aheadgrad.conventions.wholes import tangent_pattern
from aheadgrad.torchlayer.autocast import AutocastState, autocast_state

Run = Callable[[list[Any]], list[Any]]
MAX_LAYOUTS = 8


class Failure:
    """A backward that cannot be: it raises what eager raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, args: list[Any]) -> list[Any]:
        raise type(self.error)(*self.error.args)


class Backward:
    """Finds (or makes) the program for the tangents at hand."""

    def __init__(
        self,
        expected: tuple[Any, ...],
        compiled: Run | None,
        make: Callable[[tuple[Any, ...], AutocastState | None], Run],
        fixed_autocast: bool,
        lock: Any,
    ) -> None:
        self.expected = expected
        self.make = make
        self.fixed_autocast = fixed_autocast
        self.programs: dict[Any, Run] = {}
        self.used: dict[Any, frozenset[int]] = {}  # by pattern
        if compiled is not None:
            self.programs[(expected, None)] = compiled
        self.checking: Backward | None = None  # the same for anomaly mode
        self._lock = lock

    def needs(self, tangents: tuple[Tensor | None, ...]) -> frozenset[int] | None:
        """Which saved tensors the program for these tangents uses, if that is known."""
        pattern = tuple(None if t is None else _layout(t) for t in tangents)
        state = None if self.fixed_autocast else autocast_state()
        with self._lock:
            if (pattern, state) not in self.programs:
                self.programs[(pattern, state)] = self.make(pattern, state)
        return self.used.get(pattern)

    def run(self, saved: list[Any], tangents: tuple[Tensor | None, ...]) -> list[Any]:
        pattern = tuple(None if t is None else _layout(t) for t in tangents)
        state = None if self.fixed_autocast else autocast_state()
        program = self.programs.get((pattern, state))
        if program is None:
            if len(self.programs) >= MAX_LAYOUTS and any(p is not None for p in pattern):
                usual = tuple(None if p is None else e for p, e in zip(pattern, self.expected, strict=True))
                if usual != pattern and all(type(t) is Tensor for t in tangents if t is not None):
                    return self.run(saved, tuple(map(laid_out, tangents, self.expected)))
            with self._lock:
                program = self.programs.get((pattern, state))
                if program is None:
                    program = self.programs[(pattern, state)] = self.make(pattern, state)
        args = [*saved, *(t for t in tangents if t is not None)]
        if state is None:
            return program(args)
        with state.suspended():
            return program(args)


def _layout(t: Tensor) -> Any:
    return t.stride() if type(t) is Tensor else tangent_pattern(t)


def laid_out(t: Tensor | None, strides: Any) -> Tensor | None:
    """The same tangent with the strides that a program was compiled for."""
    if t is None or t.stride() == strides or type(t) is not Tensor:
        return t
    return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)

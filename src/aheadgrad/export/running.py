"""The stages of an export as one callable: the first call, later ones, and what to do with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import InvalidOption
from aheadgrad.export.lowering import compiled
from aheadgrad.export.matching import leaves_of
from aheadgrad.export.signature import Stage
from aheadgrad.export.stage_runner import Reached, Runner, Step


class Running:
    """Called as the original. Without a backend, programs run op by op."""

    def __init__(self, stages: Sequence[Stage], state: dict[str, Tensor], backend: Any = None) -> None:
        self.stages, self.state = stages, state
        self._runners = [Runner(s, state, None if backend is None else compiled(s, backend)) for s in stages]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.call(args, kwargs)
        return step if self.stages[-1].signature.backwards else step.output

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tangents: Sequence[Any] | None = None
    ) -> Step:
        return self._runner()(args, kwargs, tangents)

    def _runner(self) -> Runner:
        """Which stage it is shows in what is there."""
        signatures = [s.signature for s in self.stages]
        maybe = {name for s in signatures for name in (*s.finds, *s.gone, *(n for n, _ in s.made))}
        there = tuple(sorted(name for name in maybe if name in self.state))
        fitting = [r for s, r in zip(signatures, self._runners, strict=True) if s.finds == there]
        if not fitting:
            raise InvalidOption(
                f"exported.state has {', '.join(there) or 'nothing'} of {', '.join(sorted(maybe))}: no call "
                "begins with that. Put back what you took out."
            )
        return fitting[0]

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it, and adds gradients to `.grad`; returns what the original returns."""
        runner = self._runner()
        step = runner(args, kwargs)
        places = Reached(leaves_of(args, kwargs, runner.signature), self.state)
        wanted = {g.name: g.place for b in runner.signature.backwards for g in b.gradients}
        pairs = [(places[p], step.gradients[n]) for n, p in wanted.items() if p is not None]
        known = {id(t): (t, g) for t, g in pairs if g is not None and t.requires_grad}
        if known:
            torch.autograd.backward([t for t, _ in known.values()], [g for _, g in known.values()])
        return step.output

"""The stages of an export as one callable: the first call, later ones, and what to do with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aheadgrad.export.lowering import compiled
from aheadgrad.export.matching import leaves_of
from aheadgrad.export.runner import Reached, Runner, Step
from aheadgrad.export.signature import Stage
from aheadgrad.torchlayer.subclasses import is_foreign


class Running:
    """Called as the original. Without a backend, programs run op by op."""

    def __init__(self, stages: Sequence[Stage], state: dict[str, Tensor], backend: Any = None) -> None:
        self.stages, self.state = stages, state
        self._runners = [
            Runner(s.programs, s.signature, state, None if backend is None else compiled(s, backend))
            for s in stages
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.call(args, kwargs)
        return step if self.stages[-1].signature.backwards else step.output

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tangents: Sequence[Any] | None = None
    ) -> Step:
        return self._runner(args, kwargs)(args, kwargs, tangents)

    def _runner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
        """The first stage makes what later ones find."""
        made = [name for name, _ in self.stages[0].signature.made]
        return self._runners[0 if any(name not in self.state for name in made) else -1]

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it, and adds gradients to `.grad`; returns what the original returns."""
        runner = self._runner(args, kwargs)
        step = runner(args, kwargs)
        places = Reached(leaves_of(args, kwargs, runner.signature), self.state)
        further: dict[int, tuple[Tensor, Tensor]] = {}
        for g in {g.name: g for b in runner.signature.backwards for g in b.gradients}.values():
            grad = step.gradients[g.name]
            if g.place is None or grad is None:
                continue
            t = places[g.place]
            if t.is_leaf:
                accumulate(t, grad)
            else:
                further[id(t)] = t, grad
        if further:  # arguments with a history: on to where they come from
            torch.autograd.backward([t for t, _ in further.values()], [g for _, g in further.values()])
        return step.output


def accumulate(t: Tensor, grad: Tensor) -> None:
    """Adds to `t.grad`: a gradient of its own, laid out as the tensor is."""
    with torch.no_grad():
        if t.grad is not None:
            t.grad += grad
        elif is_foreign(grad) or grad.layout is not torch.strided:
            t.grad = grad.clone()
        else:
            t.grad = torch.empty_like(t, requires_grad=False).copy_(grad)

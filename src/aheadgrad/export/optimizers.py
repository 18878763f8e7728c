"""Optimizers that a function holds: their state as named tensors, and traced tensors in its place.

An optimizer makes its state at its first step. That step is recorded as it is, and what it makes is part of
its results; tensors like those stand in for the state (`made`) when the second step is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from aheadgrad.errors import CaptureError
from aheadgrad.torchlayer.exporting import told_of_export

See = Callable[[Any], Any]
Key = tuple[int, str]  # which parameter, and what of its state


class HeldOptimizer:
    """One optimizer as it was found; `made` are stand-ins for a state that is not there yet."""

    def __init__(self, path: str, optimizer: Optimizer) -> None:
        self.path, self.optimizer = path, optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.parameters: list[Tensor] = [p for group in self.groups for p in group["params"]]
        self.states: dict[Any, Any] = dict(optimizer.state)
        self.made: dict[Key, Tensor] = {}

    def state_of(self, k: int) -> dict[str, Any]:
        """Of the k-th parameter."""
        own = {key: t for (i, key), t in self.made.items() if i == k}
        return {**self.states.get(self.parameters[k], {}), **own}

    def tensors(self, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of its state, by name; `names` are those of parameters, by id."""
        for g, group in enumerate(self.groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield f"{self.path}.param_groups[{g}].{key}", value
        for k, p in enumerate(self.parameters):
            for key, value in self.state_of(k).items():
                if isinstance(value, Tensor):
                    yield self.name(key, names[id(p)]), value

    def name(self, key: str, parameter: str) -> str:
        return f"{self.path}.{key}.{parameter}"

    @contextmanager
    def swapped(self, see: See) -> Iterator[None]:
        """The optimizer with its tensors replaced by what the trace sees."""
        states = [(see(p), self.state_of(k)) for k, p in enumerate(self.parameters)]
        traced = {p: {key: see(v) for key, v in state.items()} for p, state in states if state}
        groups = self.optimizer.param_groups
        for group, was in zip(groups, self.groups, strict=True):
            group.update({k: see(v) for k, v in was.items()}, params=[see(p) for p in was["params"]])
        self.optimizer.state.clear()
        self.optimizer.state.update(traced)
        before = self._numbers()
        own = vars(self.optimizer)
        kept = {"step": own["step"]} if "step" in own else {}  # as schedulers put it there
        own["step"] = _untold(self.optimizer.step)
        try:
            yield
            now = self._numbers()
            for place, value in before.items():
                if now.get(place, value) != value:
                    raise CaptureError(
                        f"{self.path} keeps {place[-1]!r} as a number of Python's and changes it at each "
                        "step, which a program cannot do. Keep it in a tensor."
                    )
        finally:
            del own["step"]
            own.update(kept)
            self.optimizer.state.clear()
            self.optimizer.state.update(self.states)
            for group, was in zip(groups, self.groups, strict=True):
                group.clear()
                group.update(was)

    def _numbers(self) -> dict[tuple[Any, ...], Any]:
        """What is no tensor, by where it is."""
        found: dict[tuple[Any, ...], Any] = {}
        for p, state in self.optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, int | float):
                    found[id(p), key] = value
        for g, group in enumerate(self.optimizer.param_groups):
            found.update({(g, key): v for key, v in group.items() if isinstance(v, int | float)})
        return found

    def new(self, see: See, names: dict[int, str]) -> Iterator[tuple[Key, str, Tensor]]:
        """Inside `swapped`, after a step: the tensors of the state that this step has made."""
        for k, p in enumerate(self.parameters):
            known = self.state_of(k)
            for key, value in self.optimizer.state.get(see(p), {}).items():
                if isinstance(value, Tensor) and not isinstance(known.get(key), Tensor):
                    yield (k, key), self.name(key, names[id(p)]), value


def _untold(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that knows nothing of an export: optimizers round in other ways when they are compiled."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        with told_of_export(told=False):
            return step(*args, **kwargs)

    return plain

"""Optimizers that a function holds: their state as named tensors, and traced tensors in its place.

An optimizer makes its state at its first step. That step is recorded as it is, and what it makes is part of
its results; tensors like those stand in for the state (`there`) when the second step is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from aheadgrad.errors import CaptureError, DataDependentError
from aheadgrad.recording.compared_values import SIMPLE
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS

See = Callable[[Any], Any]
_DECIDES: Any = (DataDependentError, *DATA_DEPENDENT_ERRORS)
Names = Mapping[int, str]  # of parameters, by id


class HeldOptimizer:
    """One optimizer as it was found. `there` are the tensors of its state, by number of the parameter and by
    key, and `numbers` what else is in it: at the first step as found, then as steps have left it."""

    def __init__(self, path: str, optimizer: Optimizer) -> None:
        self.path, self.optimizer = path, optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.parameters: list[Tensor] = [p for group in self.groups for p in group["params"]]
        self.states: dict[Any, Any] = dict(optimizer.state)
        self._left: dict[tuple[int, str], Any] = {}  # numbers, and types of tensors, as a step has left them
        self.start()

    def start(self) -> None:
        self.there: dict[tuple[int, str], Tensor] = {}
        self.numbers: dict[tuple[int, str], Any] = {}
        for k, p in enumerate(self.parameters):
            for key, value in self.states.get(p, {}).items():
                (self.there if isinstance(value, Tensor) else self.numbers)[k, key] = value

    def tensors(self, names: Names) -> Iterator[tuple[str, Tensor]]:
        """All of its tensors that are there, by name; `names` are those of parameters, by id."""
        for g, group in enumerate(self.groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield self._of_group(g, key), value
        for k, key in self.there:
            yield self._name(names, k, key), self.there[k, key]

    def _of_group(self, g: int, key: str) -> str:
        return f"{self.path}.param_groups[{g}].{key}"

    def _name(self, names: Names, k: int, key: str) -> str:
        return f"{self.path}.{key}.{names[id(self.parameters[k])]}"

    def stand_in(self, names: Names, tensors: Mapping[str, Tensor]) -> None:
        """From now on these are the tensors that are there, by name; numbers are as the step left them."""
        keys = {self._name(names, k, key): (k, key) for k, key in self._left}
        self.there = {keys[name]: t for name, t in tensors.items() if name in keys}
        self.numbers = {key: value for key, value in self._left.items() if value is not Tensor}

    @contextmanager
    def swapped(self, see: See) -> Iterator[None]:
        """The optimizer with its tensors replaced by what the trace sees."""
        states: dict[Tensor, dict[str, Any]] = {}
        for (k, key), value in (*self.numbers.items(), *self.there.items()):
            states.setdefault(see(self.parameters[k]), {})[key] = see(value)
        groups = self.optimizer.param_groups
        for group, was in zip(groups, self.groups, strict=True):
            group.update({k: see(v) for k, v in was.items()}, params=[see(p) for p in was["params"]])
        self.optimizer.state.clear()
        self.optimizer.state.update(states)
        settings = self._settings()
        own = vars(self.optimizer)
        kept = {"step": own["step"]} if "step" in own else {}  # as schedulers put it there
        own["step"] = self._explained(self.optimizer.step)
        try:
            yield
            now = self._settings()
            for place, value in settings.items():
                if now.get(place) != value:
                    raise self._changes(place[-1])
        finally:
            del own["step"]
            own.update(kept)
            self.optimizer.state.clear()
            self.optimizer.state.update(self.states)
            for group, was in zip(groups, self.groups, strict=True):
                group.clear()
                group.update(was)

    def _changes(self, key: str) -> CaptureError:
        return CaptureError(
            f"{self.path} keeps {key!r} as a number of Python's and changes it at each step, which a program "
            "cannot do. Keep it in a tensor."
        )

    def _settings(self) -> dict[tuple[int, str], Any]:
        """What is no tensor in its groups."""
        groups = enumerate(self.optimizer.param_groups)
        return {
            (g, key): v for g, group in groups for key, v in group.items() if isinstance(v, (*SIMPLE, tuple))
        }

    def left(self, see: See, names: Names) -> dict[str, Tensor]:
        """Inside `swapped`: the tensors of its state as they are now, by name."""
        found: dict[str, Tensor] = {}
        self._left = {}
        for g, (group, was) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=True)):
            for key in was:
                if isinstance(was[key], Tensor) and isinstance(group.get(key), Tensor):
                    found[self._of_group(g, key)] = group[key]
        for k, p in enumerate(self.parameters):
            for key, value in self.optimizer.state.get(see(p), {}).items():
                self._left[k, key] = Tensor if isinstance(value, Tensor) else value
                if isinstance(value, Tensor):
                    found[self._name(names, k, key)] = value
        return found

    def check(self) -> None:
        """After `left`: what is no tensor is as it was, or was made by this step for good."""
        for (k, key), value in self._left.items():
            if value is Tensor:
                continue
            if not isinstance(value, SIMPLE):
                raise CaptureError(
                    f"{self.path} keeps a {type(value).__name__} in its state ({key!r}), which an export "
                    "cannot hold. Keep tensors in it, each under a key of its own."
                )
            if (k, key) in self.numbers and self.numbers[k, key] != value:
                raise self._changes(key)

    def _explained(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that tells why it cannot be recorded."""
        kind = f"{self.path} ({type(self.optimizer).__name__})"

        def run(*args: Any, **kwargs: Any) -> Any:
            if any(group.get("fused") for group in self.groups):
                raise CaptureError(
                    f"{kind} has fused=True, whose kernels cannot be recorded. Make it with foreach=True."
                )
            try:
                return step(*args, **kwargs)
            except _DECIDES as error:
                raise CaptureError(
                    f"{kind} decides what to do by numbers that it reads from tensors, such as its count of "
                    "steps or a loss, and a program cannot. Choose another optimizer, as AdamW or NAdam; or "
                    "export the gradients with loss=, and let it step outside."
                ) from error

        return run

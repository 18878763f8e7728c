"""Looks for what a function reaches: tensors, modules, optimizers and plain values, each with a path.

They are found in closures, in globals that the function names, on the object that a method belongs to, inside
of lists, dictionaries and objects there; on tensors, which may have attributes, and in their hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from aheadgrad.frontends import state
from aheadgrad.program.slots import ClosedOver
from aheadgrad.recording.plain import SIMPLE
from aheadgrad.torchlayer.hooks import hooks_on
from aheadgrad.torchlayer.subclasses import is_foreign

_DEEP = 4  # containers and objects inside of each other
_WIDE = 256  # parts of one; what is not found by name is found when it is used, and has a number
_OPAQUE = (str, bytes, int, float, complex, type(None), type, ModuleType, BuiltinFunctionType)


class Item(state.Place):
    """A place in a list."""

    def get(self) -> Any:
        return self.holder[self.key] if self.key < len(self.holder) else state.ABSENT

    def put(self, value: Any) -> None:
        self.holder[self.key] = value


def called(fn: Any) -> Any:
    """The function or module that a call runs: `state` knows nothing of other callable objects."""
    known = isinstance(fn, nn.Module | FunctionType | MethodType | partial) or not callable(fn)
    return fn if known else fn.__call__


def reached(fn: Any) -> list[Any]:
    """What a function finds outside of itself, and on the object that it is a method of."""
    run = called(fn)
    owner = getattr(fn, "__self__", getattr(run, "__self__", None))
    found = [owner, *([vars(owner)] if hasattr(owner, "__dict__") else [])]
    return [*found, *(place.get() for place in state.State(run, [], []).names)]


def attributes(modules: list[tuple[str, nn.Module]]) -> Iterator[state.Place]:
    """Tensors that are plain attributes of modules."""
    for path, module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                full = f"{path}.{name}" if path else name
                yield state.Place(vars(module), name, full, ClosedOver(full))


class Finding:
    """What one function reaches."""

    def __init__(self, fn: Any) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, Optimizer]] = []
        self.tensors: list[state.Place] = []
        self.plain: list[state.Place] = []
        self.owners: list[tuple[str, Tensor]] = []  # tensors that may have hooks and attributes
        self._seen: dict[int, Any] = {}
        run = called(fn)
        names = state.State(run, [], [])
        for path, module in names.modules:
            self._on_tensors(path, module)
        for place in names.names:
            self.look(place, place.path, 0)
        owner = run.__self__ if isinstance(run, MethodType) else None
        if owner is not None and not isinstance(owner, nn.Module):
            self.inside(owner, "self", 0)

    def look(self, place: state.Place, path: str, depth: int) -> None:
        value = place.get()
        if isinstance(value, Tensor):
            self.tensors.append(type(place)(place.holder, place.key, path, ClosedOver(path)))
            self._on(value, path, depth)
        elif value is None or isinstance(value, SIMPLE):
            self.plain.append(type(place)(place.holder, place.key, path))
        else:
            self.inside(value, path, depth)

    def inside(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, _OPAQUE) or depth > _DEEP or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, list | tuple | dict) and len(value) > _WIDE:
            return
        if isinstance(value, nn.Module):
            self.modules.append((path, value))
            for name, module in value.named_modules():
                self._on_tensors(f"{path}.{name}".strip("."), module)
        elif isinstance(value, Optimizer):
            self.optimizers.append((path, value))
            for k, p in enumerate(p for group in value.param_groups for p in group["params"]):
                self._on(p, f"{path}.params[{k}]", depth)
        elif isinstance(value, list):
            for k in range(len(value)):
                self.look(Item(value, k, path), f"{path}[{k}]", depth + 1)
        elif isinstance(value, tuple):
            for k, part in enumerate(value):
                self.inside(part, f"{path}[{k}]", depth + 1)
        elif isinstance(value, dict):
            for key in list(value):
                self.look(state.Place(value, key, path), f"{path}[{key!r}]", depth + 1)
        elif isinstance(value, MethodType | partial | FunctionType):
            self._called(value, path, depth)
        elif not _is_torchs(type(value)) and hasattr(value, "__dict__"):
            for key in vars(value):
                self.look(state.Place(vars(value), key, path), f"{path}.{key}", depth + 1)

    def _on_tensors(self, path: str, module: nn.Module) -> None:
        own = (
            module.named_parameters(recurse=False),
            module.named_buffers(recurse=False),
            vars(module).items(),
        )
        for name, t in chain(*own):
            if isinstance(t, Tensor):
                self._on(t, f"{path}.{name}".strip("."), 0)

    def _on(self, t: Tensor, path: str, depth: int) -> None:
        """What is found on a tensor: its attributes, and what its hooks hold."""
        if id(t) in self._seen:
            return
        self._seen[id(t)] = t
        self.owners.append((path, t))
        for hook in hooks_on(t):
            self.inside(hook, f"{path}.hook", depth + 1)
        for key in () if is_foreign(t) else tuple(vars(t)):
            self.look(state.Place(vars(t), key, path), f"{path}.{key}", depth + 1)

    def _called(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, MethodType):
            self.inside(value.__self__, path, depth + 1)
        elif isinstance(value, FunctionType):
            theirs = state.State(value, [], []).names if not _is_torchs(value) else []
            for place in theirs:
                self.look(place, place.path, depth + 1)
        else:
            for part in (value.func, *value.args, *value.keywords.values()):
                self.inside(part, path, depth + 1)


def _is_torchs(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in ("torch", "builtins")

"""Looks for what a function reaches: tensors, modules, optimizers and plain values, each with a path.

They are found in closures, in globals that the function names, on the object that a method belongs to, inside
of lists, dictionaries and objects there; on tensors, which may have attributes, and in their hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from aheadgrad.frontends import state
from aheadgrad.program.slots import ClosedOver
from aheadgrad.recording.compared_values import SIMPLE
from aheadgrad.torchlayer.hooks import hooks_on
from aheadgrad.torchlayer.subclasses import is_foreign

_DEEP = 4  # containers and objects inside of each other
_WIDE = 256  # parts of one; what is not found by name is found when it is used, and has a number
_OPAQUE = (str, bytes, int, float, complex, type(None), ModuleType, BuiltinFunctionType)
_CODE = (FunctionType, MethodType, partial, classmethod, staticmethod, property, type)
_OF_MODULES = vars(nn.Module()).keys() - {*state.HOOKS}
_OF_PYTHON = 1 << 9  # a class that was made by a class statement


@cache
def _of_optimizers() -> set[str]:
    """What every optimizer has. (Making one loads Dynamo.)"""
    return {*vars(Optimizer), *vars(SGD([nn.Parameter(torch.zeros(()))])), "_opt_called", "_step_count"}


class Item(state.Place):
    """A place in a list."""

    def get(self) -> Any:
        return self.holder[self.key] if self.key < len(self.holder) else state.ABSENT

    def put(self, value: Any) -> None:
        self.holder[self.key] = value


class Attribute(state.Place):
    """An attribute of a class, or in a slot of an object."""

    def get(self) -> Any:
        own = vars(self.holder) if isinstance(self.holder, type) else None
        return (
            getattr(self.holder, self.key, state.ABSENT) if own is None else own.get(self.key, state.ABSENT)
        )

    def put(self, value: Any) -> None:
        setattr(self.holder, self.key, value)


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
        self.iterators: list[state.Place] = []
        self.keyed: list[dict[Any, Any]] = []  # dictionaries with tensors for keys
        self.tables: list[
            tuple[str, Any, frozenset[Any]]
        ] = []  # of attributes, with the names that are there
        self._seen: dict[int, Any] = {}
        run = called(fn)
        names = state.State(run, [], [])
        for path, module in names.modules:
            self._in_module(path, module)
        for place in names.names:
            self.look(place, place.path, 0)
        if isinstance(run, MethodType) and not isinstance(run.__self__, nn.Module):
            self.inside(run.__self__, "self", 0)
        self._on_function(getattr(run, "__func__", run), 0)

    def look(self, place: state.Place, path: str, depth: int) -> None:
        value = place.get()
        if isinstance(value, Tensor):
            self.tensors.append(type(place)(place.holder, place.key, path, ClosedOver(path)))
            self._on(value, path, depth)
        elif value is None or isinstance(value, SIMPLE):
            self.plain.append(type(place)(place.holder, place.key, path))
        elif isinstance(value, Iterator) and not hasattr(value, "write"):
            self.iterators.append(type(place)(place.holder, place.key, path))
        else:
            self.inside(value, path, depth)

    def inside(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, _OPAQUE) or depth > _DEEP or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        keyed = isinstance(value, dict) and any(isinstance(key, Tensor) for key in value)
        if keyed:
            self.keyed.append(value)
        elif isinstance(value, list | tuple | dict) and len(value) > _WIDE:
            return
        if isinstance(value, nn.Module):
            self.modules.append((path, value))
            for name, module in value.named_modules():
                self._in_module(f"{path}.{name}".strip("."), module)
        elif isinstance(value, Optimizer):
            self.optimizers.append((path, value))
            for k, p in enumerate(p for group in value.param_groups for p in group["params"]):
                self._on(p, f"{path}.params[{k}]", depth)
            for key in vars(value).keys() - _of_optimizers():
                self.look(state.Place(vars(value), key, path), f"{path}.{key}", depth + 1)
        elif isinstance(value, list):
            for k in range(len(value)):
                self.look(Item(value, k, path), f"{path}[{k}]", depth + 1)
        elif isinstance(value, tuple):
            for k, part in enumerate(value):
                self.inside(part, f"{path}[{k}]", depth + 1)
        elif isinstance(value, dict):
            for k, key in enumerate(list(value)):
                called = f"key {k}" if isinstance(key, Tensor) else repr(key)
                self.look(state.Place(value, key, path), f"{path}[{called}]", depth + 1)
        elif isinstance(value, MethodType | partial | FunctionType):
            self._called(value, path, depth)
        elif isinstance(value, type):
            self._in_class(value, depth)
        elif not _is_torchs(type(value)):
            self._in_object(value, path, depth)

    def _in_object(self, value: Any, path: str, depth: int) -> None:
        if hasattr(value, "__dict__"):
            self.tables.append((path, vars(value), frozenset(vars(value))))
            for key in tuple(vars(value)):
                self.look(state.Place(vars(value), key, path), f"{path}.{key}", depth + 1)
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else tuple(slots):
                if hasattr(value, key):
                    self.look(Attribute(value, key, path), f"{path}.{key}", depth + 1)
        self.inside(type(value), path, depth)

    def _in_class(self, kind: type, depth: int) -> None:
        """What is in a class of the user's, but for code."""
        if _is_torchs(kind) or not kind.__flags__ & _OF_PYTHON:
            return
        path = kind.__qualname__
        self.tables.append((path, vars(kind), frozenset(vars(kind))))
        for key, value in tuple(vars(kind).items()):
            if not key.startswith("__") and not isinstance(value, _CODE):
                self.look(Attribute(kind, key, path), f"{path}.{key}", depth + 1)

    def _in_module(self, path: str, module: nn.Module) -> None:
        """What is on its tensors, in its hooks and in objects that are its attributes."""
        tables = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        own = ((key, value) for key, value in vars(module).items() if key not in _OF_MODULES)
        for name, value in chain(*tables, own):
            full = f"{path}.{name}".strip(".")
            if isinstance(value, Tensor):
                self._on(value, full, 0)
            elif not isinstance(value, nn.Module | type):
                self.inside(value, full, 1)

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
            self._on_function(value, depth)
        else:
            for part in (value.func, *value.args, *value.keywords.values()):
                self.inside(part, path, depth + 1)

    def _on_function(self, fn: Any, depth: int) -> None:
        """Its attributes, and what its parameters are if nothing is given."""
        if not isinstance(fn, FunctionType) or _is_torchs(fn):
            return
        self.tables.append((fn.__qualname__, vars(fn), frozenset(vars(fn))))
        for key in tuple(vars(fn)):
            self.look(state.Place(vars(fn), key, fn.__qualname__), f"{fn.__qualname__}.{key}", depth + 1)
        for part in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self.inside(part, f"{fn.__qualname__}.default", depth + 1)


def _is_torchs(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in ("torch", "builtins")

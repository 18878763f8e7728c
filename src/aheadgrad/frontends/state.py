"""What a recording assumes besides its arguments: module trees, closure cells, globals that are named.

    state = State(fn, arguments)
    before = state.look()          # everything in there, as values that can be compared
    before.differences(state.look())   # what a run did to it; `put_back` undoes it before eager runs

Tensors are read from their places at each call; plain values (numbers, strings, containers of such) are
compared; anything else is the same object as before. Nothing is followed into other objects: what else Python
reads is a constant of the recording.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.compiled import CompiledFunction
from aheadgrad.frontends.module import holders_in
from aheadgrad.frontends.plain import freeze, insides, is_array, refill
from aheadgrad.torchlayer.hooks import GLOBAL_HOOKS, global_hooks

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KEPT_BY_TORCH = vars(nn.Module()).keys() - {*TABLES, *HOOKS, "training"}
ABSENT = object()


@dataclass(frozen=True, eq=False)
class Place:
    """A key of a dictionary, or a closure's cell."""

    holder: Any
    key: Any
    path: str

    def get(self) -> Any:
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return ABSENT
        return self.holder.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


@dataclass(eq=False)
class Look:
    """All that was found, in order: comparable tokens by path, tensors, and containers that can change."""

    tokens: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)  # by id of a tensor: where it was found first
    containers: list[tuple[str, Any]] = field(default_factory=list)
    originals: Mapping[int, Tensor] = field(default_factory=dict)  # by id: what traced tensors stand for
    _known: dict[int, int] = field(default_factory=dict)

    def note(self, path: str, value: Any, place: Place | None = None) -> None:
        self.paths.append(path)
        if isinstance(value, Tensor) and place is not None:
            value = self.originals.get(id(value), value)
            number = self._known.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
                self.places[id(value)] = place
            self.tokens.append(number)
            return
        self.tokens.append(freeze(value, self.originals))
        if is_array(value) or any(True for _ in insides(value)):
            self.containers.append((path, value))

    def differences(self, other: Look) -> list[tuple[str, Any, Any]]:
        """`(path, here, there)` for what is different."""
        mine, theirs = (
            dict(zip(self.paths, self.tokens, strict=True)),
            dict(zip(other.paths, other.tokens, strict=True)),
        )
        paths = dict.fromkeys((*mine, *theirs))
        pairs = ((p, mine.get(p, "absent"), theirs.get(p, "absent")) for p in paths)
        return [(p, a, b) for p, a, b in pairs if a != b]


class State:
    """The trees, cells and globals of one function (and of what is given to it)."""

    def __init__(self, fn: Any, arguments: Sequence[tuple[str, Any]]) -> None:
        self.trees: list[tuple[str, nn.Module]] = []
        self.names: list[Place] = []
        self._function(fn)
        for path, value in arguments:
            self._tree(value, path)
        if any(isinstance(m, torch.jit.ScriptModule) for _, m in self.modules()):
            raise FallbackError("TorchScript cannot be recorded")
        self.holders = holders_in(list(self.modules()))
        self._before = [(d, dict(d)) for d in self.dictionaries()]
        self._values = [(p, p.get()) for p in self.names]
        found = (*(value for _, value in self._values), *map(self._attributes, self.modules()))
        self._contents = [(value, value.copy()) for value in insides(found)]

    def _function(self, fn: Any) -> None:
        fn = fn._fn if isinstance(fn, CompiledFunction) else fn
        if isinstance(fn, torch.jit.ScriptFunction):
            raise FallbackError("TorchScript cannot be recorded")
        if isinstance(fn, nn.Module):
            self._tree(fn, "")
        elif isinstance(fn, functools.partial):
            self._function(fn.func)
            for i, value in enumerate(fn.args):
                self._tree(value, f"args[{i}]")
            for name, value in fn.keywords.items():
                self._tree(value, name)
        elif isinstance(fn, MethodType):
            self._function(fn.__func__)
            self._tree(fn.__self__, "self")
        elif isinstance(fn, FunctionType):
            cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)
            self.names += [Place(cell, None, name) for name, cell in cells]
            named = dict.fromkeys(n for n in _names_in(fn.__code__) if n in fn.__globals__)
            self.names += [Place(fn.__globals__, n, n) for n in named]
            for place in self.names:
                self._tree(place.get(), place.path)
            if hasattr(fn, "__wrapped__"):
                self._function(fn.__wrapped__)

    def _tree(self, value: Any, path: str) -> None:
        if isinstance(value, nn.Module) and not any(m is value for _, m in self.trees):
            self.trees.append((path, value))

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[nn.Module] = set()
        for root, tree in self.trees:
            for path, module in tree.named_modules(memo=seen):
                yield ".".join(filter(None, (root, path))), module

    def containers(self) -> list[Any]:
        """Everything in there that can change its contents."""
        return [value for value, _ in self._contents]

    @staticmethod
    def _attributes(module: tuple[str, nn.Module]) -> tuple[Any, ...]:
        """What a module holds besides tensors, submodules and hooks."""
        own = vars(module[1]).items()
        return tuple(v for name, v in own if name not in (*TABLES, *HOOKS) and name not in _KEPT_BY_TORCH)

    def dictionaries(self) -> list[dict[str, Any]]:
        """What modules keep their attributes, tables and hooks in."""
        found = [
            d for _, m in self.modules() for d in (vars(m), *(vars(m).get(t, {}) for t in (*TABLES, *HOOKS)))
        ]
        if self.trees:
            found += [global_hooks()[name] for name in GLOBAL_HOOKS]
        return found

    def look(self, originals: Mapping[int, Tensor] | None = None) -> Look:
        """Everything as it is now; `originals` tells what traced tensors in there stand for."""
        out = Look(originals=originals or {})
        for place in self.names:
            value = place.get()
            if not isinstance(value, ModuleType):
                out.note(place.path, value, place)
        for path, module in self.modules():
            self._look_at(out, path, module)
        for name in GLOBAL_HOOKS if self.trees else ():
            out.note(name, list(global_hooks()[name].values()))
        return out

    def _look_at(self, out: Look, path: str, module: nn.Module) -> None:
        out.note(path, type(module))
        dot = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name in TABLES:
                for key, part in value.items():
                    out.note(f"{dot}{key}", part, Place(value, key, f"{dot}{key}"))
            elif name in HOOKS:
                out.note(f"{dot}{name}", tuple(value.values()))
            elif name not in _KEPT_BY_TORCH:
                out.note(f"{dot}{name}", value, Place(vars(module), name, f"{dot}{name}"))

    def put_back(self) -> None:
        """What a run has changed here goes back to what it was: eager is about to run."""
        for table, before in self._before:
            for key in [k for k in table if k not in before]:
                del table[key]
            for key, value in before.items():
                if table.get(key, ABSENT) is not value:
                    table[key] = value
        for place, value in self._values:
            if place.get() is not value:
                place.put(value)
        for container, before in self._contents:
            if freeze(container) != freeze(before):
                refill(container, before)


def changed(path: str) -> FallbackError:
    """Why a recording with side effects is refused. One that happens once is tried again at the next call."""
    error = FallbackError(
        f'the function changes {path}, which a recording cannot repeat; frontend="dynamo" can'
    )
    error.once = True
    return error


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a function's own code (and what is defined inside it) mentions."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def is_plain_list(value: Any) -> bool:
    """A list that `==` compares well enough: of whole numbers, strings and the like."""
    return type(value) is list and all(type(v) in (int, str, bool, type(None)) for v in value)

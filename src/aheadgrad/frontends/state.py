"""What a recording assumes besides its arguments: module trees, closure cells, globals that are named.

    before = State(fn, arguments).look()    # everything in there, as values that can be compared

Tensors are read from their places at each call; plain values (numbers, strings, containers of such) are
compared; anything else is the same object as before. Nothing is followed into other objects: what else Python
reads is a constant of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.compiled import CompiledFunction
from aheadgrad.frontends.function import Flat, make_call, names_in
from aheadgrad.frontends.misses import Reason, tensor_reason
from aheadgrad.program.slots import Buffer, Parameter
from aheadgrad.recording.compared_values import describe, freeze
from aheadgrad.recording.containers import Changing, insides, is_array
from aheadgrad.recording.entry_assumptions import Memory
from aheadgrad.recording.forward import Call
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import tensor_guards, unchanged_check
from aheadgrad.torchlayer.hooks import global_hooks
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.trees import tree_leaves

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KEPT_BY_TORCH = vars(nn.Module()).keys() - {*TABLES, *HOOKS, "training"}
ABSENT = object()


@dataclass(frozen=True, eq=False)
class Place:
    """A key of a dictionary, or a closure's cell; `slot` if it holds a parameter or buffer."""

    holder: Any
    key: Any
    path: str
    slot: Any = None

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


def holders(modules: Sequence[tuple[str, nn.Module]]) -> list[Place]:
    """All parameters, then all buffers, in the order of `named_parameters`."""
    found = []
    for where, kind in (("_parameters", Parameter), ("_buffers", Buffer)):
        for path, module in modules:
            table = getattr(module, where)
            for name in (n for n, value in table.items() if value is not None):
                full = f"{path}.{name}" if path else name
                found.append(Place(table, name, full, kind(full)))
    return found


def held_by(fn: Any) -> list[Place]:
    """The parameters and buffers of a module; a function has none."""
    return holders(list(fn.named_modules())) if isinstance(fn, nn.Module) else []


def call_holding(fn: Any, flat: Flat, places: list[Place], *, exact: bool = True) -> Call:
    """A call of a function for which these places hold tensors (`make_call`)."""
    return make_call(fn, flat, [(p.slot, p.get()) for p in places], partial(swapped, places), exact=exact)


@contextmanager
def swapped(places: list[Place], see: Callable[[Any], Any]) -> Iterator[None]:
    """The modules with their tensors replaced by what the trace sees."""
    originals = [place.get() for place in places]
    seen = [see(value) for value in originals]
    try:
        for place, value in zip(places, seen, strict=True):
            place.put(value)
        yield
    finally:
        for place, original in zip(places, originals, strict=True):
            place.put(original)


@dataclass(eq=False)
class Look:
    """All that was found, in order: comparable tokens by path, tensors, and containers that can change."""

    originals: Mapping[int, Tensor]  # by id: what traced tensors stand for
    in_words: bool
    found: list[tuple[str, Any]] = field(default_factory=list)  # path and token
    texts: dict[str, str] = field(default_factory=dict)  # by path
    tensors: list[Tensor] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)  # by id of a tensor: where it was found first
    containers: list[tuple[str, Any]] = field(default_factory=list)
    _known: dict[int, int] = field(default_factory=dict)

    def note(self, path: str, value: Any, place: Place | None = None) -> None:
        if self.in_words:
            self.texts[path] = "absent" if value is ABSENT else describe(value)
        if not isinstance(value, Tensor) or place is None:
            self.found.append((path, freeze(value, self.originals)))
            if is_array(value) or any(True for _ in insides(value)):
                self.containers.append((path, value))
            return
        value = self.originals.get(id(value), value)
        number = self._known.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
            self.places[id(value)] = place
        self.found.append((path, number))

    def settle(self) -> None:
        """What was found is known in words and tokens; the tensors themselves may go."""
        self.originals, self.tensors, self.places, self.containers = {}, [], {}, []

    def differences(self, other: Look) -> list[tuple[str, str, str]]:
        """`(path, here, there)` for what is different, in words."""
        mine, theirs = dict(self.found), dict(other.found)
        paths = [p for p in {**mine, **theirs} if mine.get(p, ABSENT) != theirs.get(p, ABSENT)]
        return [(p, self.texts.get(p, "absent"), other.texts.get(p, "absent")) for p in paths]


class State:
    """The trees, cells and globals of one function (and of what is given to it).

    `siblings`: the last looks of all entries of that function.
    """

    def __init__(self, fn: Any, arguments: Sequence[tuple[str, Any]], siblings: list[Any]) -> None:
        self.siblings = siblings
        self.trees: list[tuple[str, nn.Module]] = []
        self.names: list[Place] = []
        self._function(fn)
        for path, value in arguments:
            self._tree(value, path)
        self.modules: list[tuple[str, nn.Module]] = list(self._modules())
        self.hooks = global_hooks() if self.trees else {}  # of all modules, by name
        if any(isinstance(m, torch.jit.ScriptModule) for _, m in self.modules):
            raise FallbackError("TorchScript cannot be recorded")
        self.holders = holders(self.modules)
        self._values = [(p, p.get()) for p in self.names]
        found = (*(value for _, value in self._values), *(vars(m) for _, m in self.modules))
        self.containers = list(insides((*found, *self.hooks.values())))
        self._before = [Changing(container) for container in self.containers]

    def _function(self, fn: Any) -> None:
        fn = fn._fn if isinstance(fn, CompiledFunction) else fn
        if isinstance(fn, torch.jit.ScriptFunction):
            raise FallbackError("TorchScript cannot be recorded")
        if isinstance(fn, nn.Module):
            self._tree(fn, "")
        elif isinstance(fn, partial):
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
            named = dict.fromkeys(n for n in names_in(fn.__code__) if n in fn.__globals__)
            self.names += [Place(fn.__globals__, n, n) for n in named]
            self.names = [p for p in self.names if not isinstance(p.get(), ModuleType)]
            for place in self.names:
                self._tree(place.get(), place.path)
            if hasattr(fn, "__wrapped__"):
                self._function(fn.__wrapped__)

    def _tree(self, value: Any, path: str) -> None:
        if isinstance(value, nn.Module) and not any(m is value for _, m in self.trees):
            self.trees.append((path, value))

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[nn.Module] = set()
        for root, tree in self.trees:
            for path, module in tree.named_modules(memo=seen):
                yield ".".join(filter(None, (root, path))), module

    def dictionaries(self) -> list[dict[Any, Any]]:
        """What modules keep their attributes, tables and hooks in."""
        found = [
            d for _, m in self.modules for d in (vars(m), *(vars(m).get(t, {}) for t in (*TABLES, *HOOKS)))
        ]
        return [*found, *self.hooks.values()]

    def look(self, originals: Mapping[int, Tensor] | None = None, *, in_words: bool = False) -> Look:
        """Everything as it is now; `originals` tells what traced tensors in there stand for."""
        out = Look(originals or {}, in_words)
        for path, module in self._modules():
            self._look_at(out, path, module)
        for name, table in self.hooks.items():
            out.note(name, list(table.values()))
        for place in self.names:
            out.note(place.path, place.get(), place)
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
        for container in self._before:
            container.put_back()
        for place, value in self._values:
            if place.get() is not value:
                place.put(value)

    def settle(self) -> None:
        """Nothing has to be put back any more."""
        self._values, self._before, self.containers = [], [], []


# held(things) tells whether dictionaries are unchanged; ids are those of all tensors found
STAMP = "held, things, state, named, containers, hooks, ids, pointers, storages"
_NOTHING: tuple[Any, ...] = (bool, (), (), (), (), -1, frozenset(), (), frozenset())  # held(things) is false


class Surroundings:
    """The last look at the state; `inputs` are those of an entry's that it holds.

    A module with 150 parameters has hundreds of places that an entry depends on. They are looked at only when
    a dictionary has changed since the last time, or a name holds another object; otherwise one call into C++
    compares the versions that Python keeps of dictionaries, and another looks at the tensors found last time.
    Whoever registers a hook draws a number: as long as none was drawn, empty tables of hooks are empty.
    Entries that depend on memory keep pointers: a tensor that moves to other memory has another one.
    """

    def __init__(self, state: State, look: Look, inputs: Sequence[Tensor], memory: Memory) -> None:
        self._state, self._look, self._memory = state, look, memory
        self._numbers = [next(i for i, t in enumerate(look.tensors) if t is real) for real in inputs]
        self.paths = [look.places[id(real)].path for real in inputs]
        self._pattern = memory.pattern(inputs)
        self.guards = tensor_guards(list(inputs)) if inputs else None
        self.keeps_pointers = memory.matters and bool(inputs)
        hooks = {id(vars(m).get(name)) for _, m in state.modules for name in HOOKS}
        hooks.update(map(id, state.hooks.values()))
        tables = state.dictionaries()
        self._empty_hooks = [t for t in tables if not t and id(t) in hooks]
        self._watched = tuple(t for t in tables if t or id(t) not in hooks)
        self.stamp = _NOTHING
        self._siblings = state.siblings
        state.siblings.append(self)

    def renew(self) -> tuple[Any, ...] | None:
        """Looks at every place again; not while another thread has traced tensors in the module."""
        with RECORDING:
            hooks = RemovableHandle.next_id
            named = tuple(place.get() for place in self._state.names)
            held, things = unchanged_check(self._watched) if self._watched else (bool, (True,))
            now = self._state.look()
            for one in self._siblings:
                one.keep_only(now)
            fits = now.found == self._look.found
            tensors = tuple(now.tensors[i] for i in self._numbers) if fits else ()
            if not fits or not self._match(tensors):
                self.stamp = _NOTHING
                return None
            kept = tensors if self.keeps_pointers else ()
            pointers, storages = tuple(map(Tensor.data_ptr, kept)), frozenset(map(storage_key, kept))
            containers = tuple(value for _, value in now.containers)
            rest = (tensors, named, containers, hooks, frozenset(now.places), pointers, storages)
            if held(things) and not any(self._empty_hooks):  # the first check notes the versions
                self.stamp = (held, things, *rest)
            return (bool, (), *rest)

    def keep_only(self, now: Look) -> None:
        """Forgets the last look if it found tensors that are not there any more."""
        _, _, *held = self.stamp
        there = {*now.places, *map(id, tree_leaves([value for _, value in now.containers]))}
        if any(isinstance(t, Tensor) and id(t) not in there for t in tree_leaves(held[:3])):
            self.stamp = _NOTHING

    def _match(self, tensors: tuple[Tensor, ...]) -> bool:
        if self._memory.pattern(tensors) != self._pattern:
            return False
        return self.guards is None or bool(self.guards.check(*tensors))

    def differs(self) -> Reason:
        """What is different now."""
        for path, was, now in self._look.differences(self._state.look(in_words=True)):
            return Reason(path, was, now)
        tensors = self._state.look().tensors
        return tensor_reason(self.guards, self.paths, *(tensors[i] for i in self._numbers))


def changed(path: str) -> FallbackError:
    """Why a recording with side effects is refused. One that happens once is tried again at the next call."""
    why = f'the function changes {path}, which a recording cannot repeat; frontend="dynamo" can'
    error = FallbackError(why)
    error.once = True
    return error

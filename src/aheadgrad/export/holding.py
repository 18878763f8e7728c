"""What a function holds: the tensors that it reaches without being given them, each under a name.

Modules have parameters, buffers and plain attributes; optimizers have a state for each parameter. Both are
found in closures, in globals that the function names, on the object that a method belongs to, and inside of
lists, dictionaries and objects there. While the function is recorded, traced tensors are in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aheadgrad.errors import CaptureError
from aheadgrad.export.optimizers import HeldOptimizer
from aheadgrad.frontends import state
from aheadgrad.program.slots import Buffer, ClosedOver, Parameter, Slot
from aheadgrad.recording.plain import SIMPLE

_DEEP = 4  # containers and objects inside of each other
_WIDE = 256  # parts of one; what is not found by name is found when it is used, and has a number
_OPAQUE = (str, bytes, int, float, complex, type(None), type, ModuleType, BuiltinFunctionType)
See = Callable[[Any], Any]


class Item(state.Place):
    """A place in a list."""

    def get(self) -> Any:
        return self.holder[self.key] if self.key < len(self.holder) else state.ABSENT

    def put(self, value: Any) -> None:
        self.holder[self.key] = value


@dataclass(eq=False)
class HeldTensor:
    """A tensor with all its names; `kind` as in `signature.Held`."""

    tensor: Tensor
    slot: Slot
    kind: str
    names: list[str]

    @property
    def name(self) -> str:
        return self.names[0]


class Holding:
    """What one function holds; `grads` are what stands for the `.grad` of tensors, by their id."""

    def __init__(self, fn: Any) -> None:
        finding = _Finding()
        first = state.State(_called(fn), [], [])
        for place in first.names:
            finding.look(place, place.path, 0)
        owner = _owner(fn)
        if owner is not None and not isinstance(owner, nn.Module):
            finding.inside(owner, "self", 0)
        self.state = state.State(_called(fn), finding.modules, [])
        self.places = [*self.state.holders, *_attributes(self.state.modules), *finding.tensors]
        self.optimizers = [HeldOptimizer(path, optimizer) for path, optimizer in finding.optimizers]
        self.grads: dict[int, Tensor] = {}
        self._plain = finding.plain
        self._first = [(place, place.get()) for place in self._plain]
        self._given: list[tuple[state.Place, Any]] = []  # tensors, as the function finds them
        self._read: list[tuple[state.Place, Any]] = []  # plain values, in the same way
        self.replaced: dict[int, str] = {}  # by id of a tensor: the place that it lost to another for good

    @property
    def tensors(self) -> list[HeldTensor]:
        """All of them, each once."""
        found: dict[int, HeldTensor] = {}

        def note(t: Tensor, slot: Slot, kind: str, name: str) -> None:
            found.setdefault(id(t), HeldTensor(t, slot, kind, [])).names.append(name)

        for place in self.places:
            kind = {Parameter: "parameter", Buffer: "buffer"}.get(type(place.slot), "tensor")
            note(place.get(), place.slot, kind, place.path)
        for one in self.optimizers:
            for k, p in enumerate(one.parameters):
                if id(p) not in found:
                    name = f"{one.path}.params[{k}]"
                    note(p, ClosedOver(name), "tensor", name)
            for name, t in list(one.tensors({i: h.name for i, h in found.items()})):
                note(t, ClosedOver(name), "state", name)
        for key, t in self.grads.items():
            name = f"{found[key].name}.grad"
            note(t, ClosedOver(name), "gradient", name)
        return list(found.values())

    @contextmanager
    def swapped(self, see: See) -> Iterator[None]:
        """The function's own objects, with their tensors replaced by what the trace sees."""
        tensors = self.tensors
        with state.swapped(self.places, see), ExitStack() as stack:
            self._given = [(place, place.get()) for place in self.places]
            self._read = [(place, place.get()) for place in self._plain]
            for one in self.optimizers:
                stack.enter_context(one.swapped(see))
            for held in tensors:
                if id(held.tensor) in self.grads:
                    see(held.tensor).grad = see(self.grads[id(held.tensor)])
            yield

    def settle(self) -> None:
        """After a run: a tensor put in another's place (`self.b = self.b + 1`) is an update of that."""
        given, self._given = self._given, []  # what a function leaves behind is looked for, also here
        for place, value in self._read:
            now = place.get()
            if isinstance(now, Tensor):
                self.put_back()
                raise leaves_tensor(place.path)
            if type(now) is not type(value) or now != value:
                raise state.changed(place.path)
        found = [(place, t, place.get()) for place, t in given if place.get() is not t]
        self.replaced = {id(t): place.path for place, t, now in found if not _is_update(place, t, now)}
        found = [one for one in found if id(one[1]) not in self.replaced]
        with torch.no_grad():
            for (place, t, _), value in zip(found, [now.clone() for _, _, now in found], strict=True):
                t.copy_(value)
                place.put(t)

    def put_back(self) -> None:
        """Plain values as they were before anything was recorded."""
        for place, value in self._first:
            place.put(value)


def leaves_tensor(path: str) -> CaptureError:
    return CaptureError(
        f"The function leaves a tensor in {path}, where there was none, and may find it at the next call. "
        "Return it, or put one of that shape there before you export."
    )


def _is_update(place: state.Place, t: Tensor, now: Any) -> bool:
    """Is it a tensor that can stand in the other's memory? One with a history leads on to other calls."""
    same = isinstance(now, Tensor) and (now.shape, now.dtype, now.device) == (t.shape, t.dtype, t.device)
    return same and not now.requires_grad and not isinstance(place.slot, Parameter)


def _called(fn: Any) -> Any:
    """The function or module that a call runs: `state` knows nothing of other callable objects."""
    known = isinstance(fn, nn.Module | FunctionType | MethodType | partial) or not callable(fn)
    return fn if known else fn.__call__


def _owner(fn: Any) -> Any:
    called = _called(fn)
    return called.__self__ if isinstance(called, MethodType) else None


def _attributes(modules: list[tuple[str, nn.Module]]) -> Iterator[state.Place]:
    """Tensors that are plain attributes of modules."""
    for path, module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                full = f"{path}.{name}" if path else name
                yield state.Place(vars(module), name, full, ClosedOver(full))


class _Finding:
    """Looks into what names stand for."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, Optimizer]] = []
        self.tensors: list[state.Place] = []
        self.plain: list[state.Place] = []
        self._seen: dict[int, Any] = {}

    def look(self, place: state.Place, path: str, depth: int) -> None:
        value = place.get()
        if isinstance(value, Tensor):
            self.tensors.append(type(place)(place.holder, place.key, path, ClosedOver(path)))
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
        elif isinstance(value, Optimizer):
            self.optimizers.append((path, value))
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

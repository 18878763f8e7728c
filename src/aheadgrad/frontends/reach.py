"""What a function reaches without being given it: closures, globals, attributes, modules.

Tensors found there are hidden inputs, read from their place at each call, so rebinding a name is
noticed. Everything else that the code mentions (numbers, functions, containers, attributes) is an
assumption of the entry. Tensors that the run leaves there (`self.cache = h`) are left there by
every call of the entry.

Only names that occur in the code count: an object's other attributes may change freely.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.capture.origins import is_users
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.trees import tree_leaves

_SIMPLE = (int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size)
TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALWAYS = ("training", *TABLES, *HOOKS)
_MOST = 256  # elements of a container that are looked at one by one


@dataclass(frozen=True, eq=False)
class Fact:
    """A place (`holder` followed by the text `how`) and what was there."""

    holder: Any
    how: str
    value: Any


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that code can rebind; `key` is None for a closure cell."""

    holder: Any
    key: Any
    value: Any

    def now(self) -> Any:
        if isinstance(self.holder, types.CellType):
            return self.holder.cell_contents
        return self.holder.get(self.key, _ABSENT)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif value is _ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


@dataclass(frozen=True, eq=False)
class Contents:
    """A list or dictionary as it was."""

    holder: Any
    value: Any

    def now(self) -> Any:
        return self.holder.copy()

    def put(self, value: Any) -> None:
        self.holder.clear()
        if isinstance(self.holder, dict):
            self.holder.update(value)
        else:
            self.holder.extend(value)


_ABSENT = object()


class Reach:
    """Everything within reach of some functions and objects, as it is now."""

    def __init__(self, roots: list[Any], skip: list[Any]) -> None:
        self.names: set[str] = set()
        self.loose: set[int] = set()  # containers whose contents are no assumption
        self.skip = {id(table) for table in skip}
        count = -1
        while count != len(self.names):
            count = len(self.names)
            self.facts: list[Fact] = []
            self.tensors: dict[int, Fact] = {}
            self.slots: list[Slot | Contents] = []
            self._seen: dict[int, Any] = {}
            for root in roots:
                self._walk(root)

    def find(self, real: Tensor) -> tuple[Any, str] | None:
        fact = self.tensors.get(id(real))
        return None if fact is None else (fact.holder, fact.how)

    def take_changes(self, originals: dict[int, Tensor]) -> list[tuple[Callable[[Any], None], Any]]:
        """The tensors that a run has left somewhere: how to leave them there again, and the tensors.

        Traced tensors are taken away again. Other things that the run changed (a counter) stay as
        they are, since Python runs once per compile, and are no assumption of the entry. A container
        made anew from what stands in for the very tensors it held (`originals`, by id) has not
        changed: recurrent layers do so when their parameters are others than at the last call.
        """
        changes: list[tuple[Callable[[Any], None], Any]] = []
        for slot in self.slots:
            now, before = slot.now(), slot.value
            if _same(now, before, inside=isinstance(slot, Contents)):
                continue
            if _rebuilt(now, before, originals):
                slot.put(before)
                continue
            if not any(isinstance(v, Tensor) and is_wrapped(v) for v in tree_leaves(now)):
                self._forget(slot)
                continue
            slot.put(before)
            if isinstance(now, list) and _same(now[: len(before)], before, inside=True):
                self._forget(slot)
                changes.append((slot.holder.extend, now[len(before) :]))
            else:
                changes.append((slot.put, now))
        return changes

    def _forget(self, slot: Slot | Contents) -> None:
        """Drops what was assumed about a place."""
        if isinstance(slot, Contents):
            self.loose.add(id(slot.holder))
            self.facts = [f for f in self.facts if f.holder is not slot.holder]
            return
        how = ".cell_contents" if isinstance(slot.holder, types.CellType) else f".get({slot.key!r})"
        self.facts = [f for f in self.facts if f.holder is not slot.holder or f.how != how]

    def _at(self, holder: Any, how: str, value: Any) -> None:
        """Notes what is at a place, and goes on from there."""
        if isinstance(value, Tensor):
            self.tensors.setdefault(id(value), Fact(holder, how, value))
            self.facts.append(Fact(holder, how, value))
        elif not isinstance(value, types.ModuleType):
            self.facts.append(Fact(holder, how, value))
        self._walk(value)

    def _walk(self, value: Any) -> None:
        if isinstance(value, (*_SIMPLE, Tensor)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._walk(value.__func__)
            self._walk(value.__self__)
        elif type(value).__module__.startswith("aheadgrad."):  # something compiled: what is behind it counts
            for name in ("_fn", "_original"):
                self._walk(vars(value).get(name) if hasattr(value, "__dict__") else None)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._walk(part)
        elif type(value) in (list, tuple):
            self._sequence(value)
        elif isinstance(value, dict):
            self._table(value)
        elif isinstance(value, type):
            self._class(value)
            for name in sorted(self.names):
                part = inspect.getattr_static(value, name, _ABSENT)
                if isinstance(part, (*_SIMPLE, Tensor)) and not name.startswith("__"):
                    self._at(value, f".{name}", part)
        elif isinstance(value, types.ModuleType):
            if _is_own_code(getattr(value, "__file__", None)):
                self._attributes(value, vars(value))
        elif hasattr(value, "__dict__") and not isinstance(value, types.BuiltinFunctionType):
            self._class(type(value))
            self._attributes(value, vars(value))

    def _function(self, fn: types.FunctionType) -> None:
        mentioned = _names(fn.__code__)
        self.names |= mentioned
        if fn.__defaults__:
            self._at(fn, ".__defaults__", fn.__defaults__)
        if fn.__kwdefaults__:
            self._walk(fn.__kwdefaults__)
        for cell in fn.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self.slots.append(Slot(cell, None, value))
            self._at(cell, ".cell_contents", value)
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self._walk(wrapped)
        if not _is_own_code(fn.__code__.co_filename):
            return
        for name in sorted(mentioned):
            if name in fn.__globals__:
                value = fn.__globals__[name]
                self.slots.append(Slot(fn.__globals__, name, value))
                self._at(fn.__globals__, f".get({name!r})", value)

    def _sequence(self, value: Any) -> None:
        if isinstance(value, list):
            self.slots.append(Contents(value, value.copy()))
        for i, part in enumerate(value[:_MOST]):
            self._at(value, f"[{i}]", part)

    def _table(self, table: dict[Any, Any]) -> None:
        if id(table) not in self.skip:
            self.slots.append(Contents(table, table.copy()))
        for key, part in list(table.items())[:_MOST]:
            if isinstance(key, str | int):
                self._at(table, f".get({key!r})", part)

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base in (object, nn.Module):
                continue
            for name, value in vars(base).items():
                if name != "forward" and name != "__call__" and name not in self.names:
                    continue
                value = getattr(value, "__func__", value)
                if isinstance(value, property):
                    value = value.fget
                if isinstance(value, types.FunctionType):
                    self._walk(value)

    def _attributes(self, value: Any, table: dict[str, Any]) -> None:
        module = isinstance(value, nn.Module)
        for name in sorted(self.names.union(_ALWAYS) if module else self.names):
            if name.startswith("__"):
                continue
            part = table.get(name, _ABSENT)
            if module and part is _ABSENT and any(name in table[t] for t in TABLES if t in table):
                continue
            self.slots.append(Slot(table, name, part))
            if part is not _ABSENT:
                self._at(table, f".get({name!r})", part)
            elif not isinstance(value, types.ModuleType):
                inherited = inspect.getattr_static(type(value), name, _ABSENT)
                if isinstance(inherited, (*_SIMPLE, Tensor)):
                    self._at(value, f".{name}", inherited)


def _rebuilt(now: Any, before: Any, originals: dict[int, Tensor]) -> bool:
    """Is this a list of what stands in for the tensors that were listed before?"""
    if type(now) is not list or type(before) is not list:
        return False
    return _same([_original(v, originals) for v in now], before, inside=True)


def _original(value: Any, originals: dict[int, Tensor]) -> Any:
    """What a traced tensor (or a weak reference to one) stands for; anything else as it is."""
    if type(value) is weakref.ref:
        original = originals.get(id(value()))
        return value if original is None else weakref.ref(original)
    return originals.get(id(value), value)


def _same(now: Any, before: Any, inside: bool = False) -> bool:
    if inside:
        if isinstance(now, dict):
            return list(now) == list(before) and all(map(_same, now.values(), before.values()))
        return len(now) == len(before) and all(map(_same, now, before))
    return now is before or (type(now) is type(before) and isinstance(now, _SIMPLE) and bool(now == before))


@functools.cache
def _is_own_code(filename: str | None) -> bool:
    """Is this code whose globals may change: not a library's?"""
    if filename is None or not is_users(filename):
        return False
    return "site-packages" not in filename and not filename.startswith(inspect.__file__.rsplit("/", 1)[0])


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return frozenset(found)


@dataclass(frozen=True, eq=False)
class Given:
    """A list or dictionary among the arguments, by the way to it."""

    path: tuple[Any, ...]
    holder: Any
    value: Any

    def put(self, arguments: Any, value: Any) -> None:
        for step in self.path:
            arguments = arguments[step]
        Contents(arguments, None).put(value)


def containers(value: Any, path: tuple[Any, ...] = ()) -> list[Given]:
    """The lists and dictionaries in a structure of arguments, as they are now."""
    if type(value) not in (list, tuple, dict):
        return []
    found = [Given(path, value, value.copy())] if len(path) > 1 and type(value) is not tuple else []
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    for step, part in steps:
        found += containers(part, (*path, step))
    return found


def changed_containers(before: list[Given]) -> list[tuple[Given, Any]]:
    return [(g, g.holder.copy()) for g in before if not _same(g.holder, g.value, inside=True)]

"""What a function reaches without being given it: closures, globals, attributes, modules.

Tensors found there are hidden inputs, read from their place at each call, so rebinding a name is
noticed. Everything else that the code mentions (numbers, functions, containers, attributes) is an
assumption of the entry. What the run changes there is taken care of in `changes.py`.

Only names that occur in the code count: an object's other attributes may change freely. Code that
asks for attributes by computed names (`getattr`, `vars`) counts as mentioning all of them. What
cannot be followed (`eval`, thread-local data, iterators) is refused: such a call runs uncompiled.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.mentions import ANY, EQUAL, asked, hides_in, imports_in, names_in, reads_in
from aheadgrad.frontends.own import (
    answers_names,
    function_of,
    is_generated,
    is_looked_into,
    is_own_class,
    is_own_code,
    is_own_method,
    is_own_module,
)
from aheadgrad.frontends.places import ABSENT, Content, Contents, Fact, Newcomers, Slot
from aheadgrad.frontends.plain import COMPARED, SIMPLE, describe, freeze, frozen, is_array
from aheadgrad.torchlayer.hooks import GLOBAL_HOOKS, global_hooks, parametrization_cache

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", *GLOBAL_HOOKS)
_ALWAYS = ("training", *TABLES, *HOOKS[:4])
_MOST = 256  # elements of a container that are looked at one by one
_LOOKS_THROUGH = {"parameters", "buffers", "children", "modules", "state_dict", "apply", *TABLES}
_LOOKS_THROUGH |= {"named_parameters", "named_buffers", "named_children", "named_modules"}
_MAKING = {"__init__", "__new__", "__post_init__"}  # called where the code has the class itself
_SHOWING = {"__repr__": {"repr", "str"}, "__str__": {"str"}, "__hash__": {"hash"}}
_NOT_IN_CALLS = {"__del__", "__init_subclass__", "__reduce__", *_MAKING, *_SHOWING}
_OF_FUNCTIONS = {"forward", "backward", "setup_context", "vjp", "jvp"}  # torch calls these by itself
_DESCRIBED = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
_HOLDING = (set, frozenset, deque, types.MappingProxyType)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)


class Reach:
    """Everything within reach of some functions and objects (with their names), as it is now."""

    def __init__(self, roots: list[tuple[str, Any]], skip: list[Any]) -> None:
        self.names: set[str] = set()
        self.reads: set[str] = set()  # names whose value the code looks at
        self.updates: set[str] = set()  # ... or adds something to, as to a counter
        self.loose: set[int] = set()  # containers whose contents are no assumption
        self.skip = {id(table) for table in skip}
        self._in_class: dict[tuple[type, str], Any] = {}
        self._inherits: dict[tuple[type, int], list[tuple[str, Any]]] = {}
        count = -1
        while count != len(self.names):
            count = len(self.names)
            self.facts: list[Fact] = []
            self.contents: list[Content] = []
            self.containers: dict[int, tuple[Any, str]] = {}  # lists and dictionaries, with their paths
            self.tensors: dict[int, Fact] = {}
            self.slots: list[Slot | Contents] = []
            self.newcomers: list[Newcomers] = []
            self.tables: dict[int, dict[Any, Any]] = {}  # dictionaries that seldom change, by id
            self.owned: list[Any] = []  # objects of the user's own classes
            self.modules: list[nn.Module] = []
            self._owners: dict[int, Any] = {}  # objects by the id of their attributes' table
            self._called: dict[int, set[str | None]] = {}  # what the code calls a container, by its id
            self._seen: dict[int, Any] = {}
            self._classes: set[type] = set()
            self._any_name = ANY in self.names
            self.idle: set[int] = set()  # empty tables of modules that nobody looks through
            try:
                for path, root in roots:
                    self._walk(root, path)
            except RecursionError:
                raise FallbackError("what the function reaches is nested too deeply to be followed") from None

    def find(self, real: Tensor) -> Fact | None:
        return self.tensors.get(id(real))

    def everything(self) -> list[Any]:
        """All that was walked over, tensors and plain values apart."""
        return list(self._seen.values())

    def is_read(self, slot: Slot | Contents, *, traced: bool) -> bool:
        """May the code look at what is at a place? That it counts there does not matter without tensors."""
        if isinstance(slot, Contents):
            called = self._called.get(id(slot.holder), {None})
        else:
            called = {slot.name}
        return None in called or not (self.updates if traced else self.reads).isdisjoint(called)

    def forget(self, slot: Slot | Contents) -> None:
        """Drops what was assumed about a place."""
        if isinstance(slot, Contents):
            self.loose.add(id(slot.holder))
            self.facts = [f for f in self.facts if f.holder is not slot.holder]
            self.contents = [c for c in self.contents if c.holder is not slot.holder]
            return
        hows = {f".get({slot.key!r})", f".{slot.key}", f".__dict__.get({slot.key!r})"}
        hows = {".cell_contents"} if isinstance(slot.holder, types.CellType) else hows
        whose = (slot.holder, self._owners.get(id(slot.holder), slot.holder))
        self.facts = [f for f in self.facts if f.how not in hows or not any(f.holder is w for w in whose)]

    def _at(self, holder: Any, how: str, value: Any, path: str, name: str | None = None) -> None:
        """Notes what is at a place (that the code calls by `name`), and goes on from there."""
        fact = Fact(holder, how, value, path, id(holder) in self.tables)
        if isinstance(value, Tensor):
            self.tensors.setdefault(id(value), fact)
        if isinstance(value, list | dict | set | deque):
            self._called.setdefault(id(value), set()).add(name)
        if not isinstance(value, types.ModuleType) and type(holder) is not tuple:
            self.facts.append(fact)
        self._walk(value, path)

    def _walk(self, value: Any, path: str) -> None:
        if type(value) in SIMPLE or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self._walk(value.__func__, path)
            self._walk(value.__self__, f"{path}.__self__")
        elif type(value).__module__.startswith("aheadgrad."):  # something compiled: what is behind it counts
            for name in ("_fn", "_original"):
                self._walk(vars(value).get(name) if hasattr(value, "__dict__") else None, path)
        elif isinstance(value, type):
            self._class(value)
            self._of_type(value, path)
        elif isinstance(value, types.ModuleType):
            if is_own_module(value):
                self._attributes(value, vars(value), path)
        elif isinstance(value, (*SIMPLE, Tensor)):
            own = not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter)
            if own and not self.names.isdisjoint(getattr(value, "__dict__", ())):  # set by hand
                self._attributes(value, vars(value), path)
        elif not self._structure(value, path) and not self._indirect(value, path):
            self._object(value, path)

    def _structure(self, value: Any, path: str) -> bool:
        """Containers and partial calls."""
        if isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._walk(part, path)
        elif isinstance(value, list | tuple):
            self._sequence(value, path)
            if hasattr(value, "__dict__"):
                self._object(value, path)
        elif isinstance(value, dict):
            self._table(value, path)
            if getattr(value, "__dict__", None) or (type(value) not in (dict, OrderedDict)):
                self._object(value, path)
        elif type(value) in COMPARED or is_array(value):
            self.contents.append(Content(value, frozen(value, path), path))
            if isinstance(value, set | deque):
                self.slots.append(Contents(value, value.copy()))
            inside = value.values() if isinstance(value, types.MappingProxyType) else value
            for part in inside if isinstance(value, _HOLDING) else ():
                self._walk(part, path)
        else:
            return False
        return True

    def _indirect(self, value: Any, path: str) -> bool:
        """What leads to something else (bound methods, weak references), or cannot be checked at all."""
        if isinstance(value, _BOUND):
            if not isinstance(value.__self__, types.ModuleType | type | None):
                self._walk(value.__self__, path)
        elif isinstance(value, weakref.ref):
            self._walk(value(), path)
        elif isinstance(value, contextvars.ContextVar):
            self._at(value, ".get(None)", value.get(None), path)
        elif hasattr(type(value), "cache_clear") and hasattr(value, "__wrapped__"):
            self._walk(value.__wrapped__, path)
        elif type(value).__module__ == "operator":  # attrgetter, itemgetter, methodcaller
            if not self.names.issuperset(names := {n for n in value.__reduce__()[1] if isinstance(n, str)}):
                self.names |= names.union(*(n.split(".") for n in names))
                self.reads |= self.names
        elif isinstance(value, threading.local):
            raise FallbackError(f"{path} is a threading.local, which is another for each thread")
        elif hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            raise FallbackError(f"{path} is an iterator, which changes when it is used")
        elif type(value).__module__ == "numpy.ma" or hasattr(type(value), "__array_finalize__"):
            raise FallbackError(f"{path} is a {type(value).__name__}, an array that is not compared")
        else:
            return False
        return True

    def _object(self, value: Any, path: str) -> None:
        self._class(type(value))
        if is_own_class(type(value)):
            self.owned.append(value)
        for base in type(value).__mro__:
            for name, part in vars(base).items():
                if isinstance(part, types.MemberDescriptorType) and base.__module__ != "builtins":
                    if name not in self.names and not self._any_name:
                        continue
                    now = getattr(value, name, ABSENT)
                    self.slots.append(Slot(value, name, now, name))
                    self._at(value, f".{name}", now, f"{path}.{name}", name)
        if hasattr(value, "__dict__"):
            self._attributes(value, vars(value), path)

    def _function(self, fn: types.FunctionType, path: str) -> None:
        mentioned = (reads_in if fn.__name__ in _MAKING else names_in)(fn.__code__)  # it writes to a new one
        self.names |= mentioned
        self.reads |= reads_in(fn.__code__)
        self.updates |= reads_in(fn.__code__, updates=True)
        if fn.__defaults__:
            self._at(fn, ".__defaults__", fn.__defaults__, f"the defaults of {fn.__name__}")
        if fn.__kwdefaults__:
            self._at(fn, ".__kwdefaults__", fn.__kwdefaults__, f"the defaults of {fn.__name__}")
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self.slots.append(Slot(cell, None, value, name))
            self._at(cell, ".cell_contents", value, name, name)
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self._walk(wrapped, path)
        if is_own_code(fn.__code__.co_filename):
            self._own_function(fn, mentioned)

    def _own_function(self, fn: types.FunctionType, mentioned: frozenset[str]) -> None:
        """What the user's own code finds besides: globals, imports, attributes of the function."""
        hides = hides_in(fn.__code__)
        if hides is not None:
            raise FallbackError(f"{fn.__name__} calls {hides}, so what it reads cannot be told from its code")
        if "_version" in mentioned:
            raise FallbackError(f"{fn.__name__} reads a version counter, which moves with each change")
        self.facts.append(Fact(fn, ".__code__", fn.__code__, f"the code of {fn.__name__}"))
        for name in sorted(mentioned):
            value = fn.__globals__.get(name, ABSENT)
            self.slots.append(Slot(fn.__globals__, name, value, name))
            if value is not ABSENT:
                self._at(fn.__globals__, f".get({name!r})", value, name, name)
        for name in sorted(imports_in(fn.__code__)):
            self._walk(sys.modules.get(name), name)
        if self.names.isdisjoint(vars(fn)):
            self.newcomers.append(Newcomers(vars(fn), frozenset(vars(fn))))
        else:
            self._attributes(fn, vars(fn), fn.__name__)

    def _sequence(self, value: Any, path: str) -> None:
        if isinstance(value, list):
            self.slots.append(Contents(value, value.copy()))
            self.containers[id(value)] = (value, path)
        for i, part in enumerate(value):
            if i < _MOST:
                self._at(value, f"[{i}]", part, f"{path}[{i}]")
            else:
                self._walk(part, f"{path}[{i}]")
        if type(value) not in (list, tuple) or (isinstance(value, list) and len(value) > _MOST):
            self.contents.append(Content(value, frozen(value, path), path))

    def _table(self, table: dict[Any, Any], path: str) -> None:
        self.tables[id(table)] = table
        self.containers[id(table)] = (table, path)
        if id(table) not in self.skip:
            self.slots.append(Contents(table, dict(table)))
        owner, _, name = path.rpartition(".")
        for key, part in list(table.items()):
            if type(key) in (str, int):
                step = f"{owner}.{key}" if name in TABLES else f"{path}[{key!r}]"
                self._at(table, f".get({key!r})", part, step.removeprefix("."))
            else:
                self._walk(part, f"{path}[{describe(key)}]")
        ordered = type(table) is OrderedDict and table and name not in HOOKS  # its order changes unseen
        if ordered or type(table) not in (dict, OrderedDict) or any(type(k) not in (str, int) for k in table):
            self.contents.append(Content(table, freeze(table), path))

    def _class(self, cls: type) -> None:
        """The methods and the data that the code mentions or implies, of a class and those before it."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        for base in cls.__mro__:
            if base in (object, nn.Module) or base.__module__ == "builtins":
                continue
            own = is_own_class(base)
            if own:
                self.newcomers.append(Newcomers(base, frozenset(vars(base))))
            for name, value in list(vars(base).items()):
                used = name in self.names or name in ("forward", "__call__")
                used = used or (name in _OF_FUNCTIONS and issubclass(cls, Function))
                if not used and not (own and self._is_implied(name, value)):
                    continue
                if isinstance(value, _DESCRIBED):
                    if own or is_own_method(value):
                        self._method(cls, base, name, value)
                    if isinstance(function_of(value), types.FunctionType):
                        self._walk(function_of(value), f"{base.__name__}.{name}")
                elif own and not name.startswith("__"):
                    self._data(cls, base, name, value)

    def _is_implied(self, name: str, value: Any) -> bool:
        """A method that operators call; one that `dataclass` made, only where objects are compared."""
        if not name.startswith("__") or not isinstance(value, types.FunctionType):
            return False
        if name in _SHOWING:
            return not _SHOWING[name].isdisjoint(self.names)
        return name not in _NOT_IN_CALLS and (not is_generated(value) or EQUAL in self.names)

    def _data(self, cls: type, base: type, name: str, value: Any) -> None:
        """Something else that a class of the user's has: a table, a list, a builtin function."""
        self.slots.append(Slot(base, name, value, name))
        if hasattr(type(value), "__get__") and not isinstance(value, types.BuiltinFunctionType):
            return
        how = f".{name}" if getattr(cls, name, None) is value else f".__dict__.get({name!r})"
        self._at(cls if how[1] != "_" else base, how, value, f"{base.__name__}.{name}", name)

    def _of_type(self, cls: type, path: str) -> None:
        """What the code finds in a class that it has by name, or calls to make an object."""
        for name in sorted(self.names):
            part = inspect.getattr_static(cls, name, ABSENT)
            if isinstance(part, (*SIMPLE, Tensor)) and not name.startswith("__"):
                self._at(cls, f".{name}", part, f"{path}.{name}", name)
        if not is_own_class(cls):
            return
        for name in sorted(_MAKING):
            made_by = inspect.getattr_static(cls, name, None)
            if isinstance(made_by, types.FunctionType) and is_own_method(made_by):
                self._walk(made_by, f"{cls.__name__}.{name}")

    def _method(self, cls: type, base: type, name: str, value: Any) -> None:
        """A method is the same as before, and no class on the way has got one in its place."""
        path = f"{base.__name__}.{name}"
        if getattr(cls, name, None) is value:
            self.facts.append(Fact(cls, f".{name}", value, path))
            return
        how = f".__dict__.get({name!r})"
        self.facts.append(Fact(base, how, value, path))
        for other in cls.__mro__[: cls.__mro__.index(base)]:
            if name not in vars(other) and is_own_class(other):
                self.facts.append(Fact(other, how, ABSENT, f"{other.__name__}.{name}"))

    def _attributes(self, value: Any, table: dict[str, Any], path: str) -> None:
        module = isinstance(value, nn.Module)
        known = not isinstance(value, types.ModuleType)
        if known:
            self.tables[id(table)] = table
            self._owners[id(table)] = value
        names = self.names.union(_ALWAYS) if module else self.names
        if module:
            self._module(value, table)
        if known and not module and (self._any_name or is_looked_into(type(value))):
            names = names.union(table)
        elif known:
            names = names.union(
                n for n in table if not n.isidentifier()
            )  # such are asked for by computed names
        names = names | {"forward"} if module else names
        for name in sorted(names & table.keys()):
            if known or not name.startswith("__"):
                self.slots.append(Slot(table, name, table[name], name))
                self._at(table, f".get({name!r})", table[name], f"{path}.{name}".removeprefix("."), name)
        if not known:
            absent = [name for name in names if name not in table]
            self.slots += [Slot(table, name, ABSENT, name) for name in absent]
            return
        self.newcomers.append(Newcomers(table, frozenset(table)))
        inside = [table[t] for t in TABLES if t in table] if module else []
        for name, found in self._of_class(type(value)):
            if name not in table and not any(name in t for t in inside):
                self._inherited(value, table, name, path, found)

    def _module(self, module: nn.Module, table: dict[str, Any]) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise FallbackError(f"a {type(module).__name__} is reached, a scripted module")
        if not self.modules:
            for name in GLOBAL_HOOKS:
                hooks = global_hooks()[name]
                self.facts.append(Fact(global_hooks(), f".get({name!r})", hooks, name, True))
                self._walk(hooks, name)
        self.modules.append(module)
        if not self._is_looked_through(module):
            self.idle.update(id(table[t]) for t in TABLES if t in table and not table[t])
        if "parametrizations" in table.get("_modules", ()):
            cache, name = parametrization_cache(), "_cache_enabled"
            if cache[name]:
                raise FallbackError("parametrize.cached() is active, which keeps tensors between calls")
            self._at(cache, f".get({name!r})", cache[name], f"parametrize.{name}")

    def _is_looked_through(self, module: nn.Module) -> bool:
        """May the code notice something new in a module, besides under the names it mentions?"""
        return self._any_name or hasattr(module, "__iter__") or not _LOOKS_THROUGH.isdisjoint(self.names)

    def _of_class(self, cls: type) -> list[tuple[str, Any]]:
        """What a class has under the names, and which of those it lacks the code asks for."""
        count = len(self.names)  # names only ever become more
        known = self._inherits.get((cls, count))
        if known is not None:
            return known
        found = []
        names = self.names.union(_ALWAYS, ["forward"]) if issubclass(cls, nn.Module) else self.names
        for name in sorted(names):
            if name.startswith("__") or not name.isidentifier():
                continue
            if (cls, name) not in self._in_class:
                self._in_class[cls, name] = inspect.getattr_static(cls, name, ABSENT)
            value = self._in_class[cls, name]
            if value is not ABSENT or asked(name) in self.names or answers_names(cls):
                found.append((name, value))
        self._inherits[cls, count] = found
        return found

    def _inherited(self, value: Any, table: dict[str, Any], name: str, path: str, found: Any) -> None:
        """A name that is not the object's own: its class may have it, and it may get it."""
        path = f"{path}.{name}".removeprefix(".")
        if isinstance(found, (*SIMPLE, Tensor)) and not _is_in_own_class(type(value), name):
            self._at(value, f".{name}", found, path)
        elif found is not ABSENT:
            self.facts.append(Fact(table, f".get({name!r})", ABSENT, path, True))
        else:  # the code asks for it, or the class answers
            tables = [table.get(t) for t in TABLES] if isinstance(value, nn.Module) else []
            for where in (table, *(t for t in tables if t is not None)):
                self.idle.discard(id(where))
                self.facts.append(Fact(where, f".get({name!r})", ABSENT, path, True))


def _is_in_own_class(cls: type, name: str) -> bool:
    """Is it a class of the user's that has this, so that the class itself is looked at?"""
    return any(name in vars(base) and is_own_class(base) for base in cls.__mro__)

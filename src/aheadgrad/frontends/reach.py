"""What a function reaches without being given it: closures, globals, attributes, modules.

Tensors found there are hidden inputs, read from their place at each call, so rebinding a name is
noticed. Everything else that the code mentions (numbers, functions, containers, attributes) is an
assumption of the entry. Tensors that the run leaves there (`self.cache = h`) are left there by
every call of the entry.

Only names that occur in the code count: an object's other attributes may change freely. Code that
asks for attributes by computed names (`getattr`, `vars`) counts as mentioning all of them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from aheadgrad.capture.origins import is_users
from aheadgrad.errors import FallbackError
from aheadgrad.frontends.mentions import ANY, asked, names_in
from aheadgrad.frontends.places import ABSENT, Content, Contents, Fact, Newcomers, Slot, same
from aheadgrad.frontends.plain import COMPARED, SIMPLE, describe, freeze, frozen, is_array
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.symbols import is_symbolic
from aheadgrad.torchlayer.trees import tree_leaves

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALWAYS = ("training", *TABLES, *HOOKS)
_MOST = 256  # elements of a container that are looked at one by one
_LOOKS_THROUGH = {"parameters", "buffers", "children", "modules", "state_dict", "apply", *TABLES}
_LOOKS_THROUGH |= {"named_parameters", "named_buffers", "named_children", "named_modules"}
_NOT_IN_CALLS = {"__init__", "__new__", "__del__", "__repr__", "__str__", "__init_subclass__", "__reduce__"}


class Reach:
    """Everything within reach of some functions and objects (with their names), as it is now."""

    def __init__(self, roots: list[tuple[str, Any]], skip: list[Any]) -> None:
        self.names: set[str] = set()
        self.loose: set[int] = set()  # containers whose contents are no assumption
        self.skip = {id(table) for table in skip}
        self._in_class: dict[tuple[type, str], Any] = {}
        self._inherits: dict[tuple[type, int], list[tuple[str, Any]]] = {}
        count = -1
        while count != len(self.names):
            count = len(self.names)
            self.facts: list[Fact] = []
            self.contents: list[Content] = []
            self.tensors: dict[int, Fact] = {}
            self.slots: list[Slot | Contents] = []
            self.newcomers: list[Newcomers] = []
            self.tables: dict[int, dict[Any, Any]] = {}  # dictionaries that seldom change, by id
            self.owned: list[Any] = []  # objects of the user's own classes
            self._owners: dict[int, Any] = {}  # objects by the id of their attributes' table
            self._seen: dict[int, Any] = {}
            self._any_name = ANY in self.names
            self.idle: set[int] = set()  # empty tables of modules that nobody looks through
            for path, root in roots:
                self._walk(root, path)

    def find(self, real: Tensor) -> Fact | None:
        return self.tensors.get(id(real))

    def everything(self) -> list[Any]:
        """All that was walked over, tensors and plain values apart."""
        return list(self._seen.values())

    def take_changes(self, originals: dict[int, Tensor]) -> list[tuple[Callable[[Any], None], Any]]:
        """The tensors that a run has left somewhere: how to leave them there again, and the tensors.

        Traced tensors are taken away again. Other things that the run changed (a counter) stay as
        they are, since Python runs once per compile, and are no assumption of the entry. A container
        made anew from what stands in for the very tensors it held (`originals`, by id) has not
        changed: recurrent layers do so when their parameters are others than at the last call.
        """
        changes: list[tuple[Callable[[Any], None], Any]] = []
        new = [slot for n in self.newcomers for slot in n.slots()]
        for slot in [*self.slots, *new]:
            now, before = slot.now(), slot.value
            if same(now, before, inside=isinstance(slot, Contents)):
                continue
            if _rebuilt(now, before, originals):
                slot.put(before)
                continue
            leaves = tree_leaves(now)
            if any(map(is_symbolic, leaves)):
                slot.put(before)
                raise FallbackError("the function keeps a size that may be any number")
            if not any(isinstance(v, Tensor) and is_wrapped(v) for v in leaves):
                self._forget(slot)
                continue
            slot.put(before)
            if isinstance(now, list) and same(now[: len(before)], before, inside=True):
                self._forget(slot)
                changes.append((slot.holder.extend, now[len(before) :]))
            else:
                changes.append((slot.put, now))
        self.contents = [c for c in self.contents if freeze(c.holder) == c.frozen]
        return changes

    def _forget(self, slot: Slot | Contents) -> None:
        """Drops what was assumed about a place."""
        if isinstance(slot, Contents):
            self.loose.add(id(slot.holder))
            self.facts = [f for f in self.facts if f.holder is not slot.holder]
            return
        how = ".cell_contents" if isinstance(slot.holder, types.CellType) else f".get({slot.key!r})"
        owner = self._owners.get(id(slot.holder))
        self.facts = [
            f
            for f in self.facts
            if (f.holder is not slot.holder or f.how != how)
            and (f.holder is not owner or f.how != f".{slot.key}")
        ]

    def _at(self, holder: Any, how: str, value: Any, path: str) -> None:
        """Notes what is at a place, and goes on from there."""
        fact = Fact(holder, how, value, path, id(holder) in self.tables)
        if isinstance(value, Tensor):
            self.tensors.setdefault(id(value), fact)
        if not isinstance(value, types.ModuleType) and type(holder) is not tuple:
            self.facts.append(fact)
        self._walk(value, path)

    def _walk(self, value: Any, path: str) -> None:
        if isinstance(value, (*SIMPLE, Tensor)) or id(value) in self._seen:
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
        elif isinstance(value, functools.partial):
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
        elif isinstance(value, type):
            self._class(value)
            for name in sorted(self.names):
                part = inspect.getattr_static(value, name, ABSENT)
                if isinstance(part, (*SIMPLE, Tensor)) and not name.startswith("__"):
                    self._at(value, f".{name}", part, f"{path}.{name}")
        elif isinstance(value, types.ModuleType):
            if _is_own_code(getattr(value, "__file__", None)):
                self._attributes(value, vars(value), path)
        elif not isinstance(value, types.BuiltinFunctionType):
            self._object(value, path)

    def _object(self, value: Any, path: str) -> None:
        self._class(type(value))
        if _is_own_code(_file_of(type(value))):
            self.owned.append(value)
        for base in type(value).__mro__:
            for name, part in vars(base).items():
                if isinstance(part, types.MemberDescriptorType) and base.__module__ != "builtins":
                    now = getattr(value, name, ABSENT)
                    if now is not ABSENT and (name in self.names or self._any_name):
                        self._at(value, f".{name}", now, f"{path}.{name}")
        if hasattr(value, "__dict__"):
            self._attributes(value, vars(value), path)

    def _function(self, fn: types.FunctionType, path: str) -> None:
        mentioned = names_in(fn.__code__)
        self.names |= mentioned
        if fn.__defaults__:
            self._at(fn, ".__defaults__", fn.__defaults__, f"the defaults of {fn.__name__}")
        if fn.__kwdefaults__:
            self._at(fn, ".__kwdefaults__", fn.__kwdefaults__, f"the defaults of {fn.__name__}")
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self.slots.append(Slot(cell, None, value))
            self._at(cell, ".cell_contents", value, name)
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self._walk(wrapped, path)
        if not _is_own_code(fn.__code__.co_filename):
            return
        self.facts.append(Fact(fn, ".__code__", fn.__code__, f"the code of {fn.__name__}"))
        for name in sorted(mentioned):
            if name in fn.__globals__:
                value = fn.__globals__[name]
                self.slots.append(Slot(fn.__globals__, name, value))
                self._at(fn.__globals__, f".get({name!r})", value, name)

    def _sequence(self, value: Any, path: str) -> None:
        if isinstance(value, list):
            self.slots.append(Contents(value, value.copy()))
        for i, part in enumerate(value):
            if i < _MOST:
                self._at(value, f"[{i}]", part, f"{path}[{i}]")
            else:
                self._walk(part, f"{path}[{i}]")
        if type(value) not in (list, tuple) or (isinstance(value, list) and len(value) > _MOST):
            self.contents.append(Content(value, frozen(value, path), path))

    def _table(self, table: dict[Any, Any], path: str) -> None:
        self.tables[id(table)] = table
        if id(table) not in self.skip:
            self.slots.append(Contents(table, table.copy()))
        owner, _, name = path.rpartition(".")
        for key, part in list(table.items()):
            if type(key) in (str, int):
                step = f"{owner}.{key}" if name in TABLES else f"{path}[{key!r}]"
                self._at(table, f".get({key!r})", part, step.removeprefix("."))
            else:
                self._walk(part, f"{path}[{describe(key)}]")
        if type(table) not in (dict, OrderedDict) or any(type(key) not in (str, int) for key in table):
            self.contents.append(Content(table, freeze(table), path))

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base in (object, nn.Module) or base.__module__ == "builtins":
                continue
            own = _is_own_code(_file_of(base))
            for name, value in vars(base).items():
                used = name in self.names or name in ("forward", "__call__")
                implied = own and name.startswith("__") and name not in _NOT_IN_CALLS and _is_written(value)
                if not used and not implied:
                    continue
                if isinstance(value, types.FunctionType | property | staticmethod | classmethod):
                    if own and used:
                        self._method(cls, base, name, value)
                    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(value, types.FunctionType):
                    self._walk(value, f"{base.__name__}.{name}")

    def _method(self, cls: type, base: type, name: str, value: Any) -> None:
        """A method is the same as before, and no class on the way has got one in its place."""
        path = f"{base.__name__}.{name}"
        if getattr(cls, name, None) is value:
            self.facts.append(Fact(cls, f".{name}", value, path))
        else:
            self.facts.append(Fact(base, f".__dict__.get({name!r})", value, path))

    def _attributes(self, value: Any, table: dict[str, Any], path: str) -> None:
        module = isinstance(value, nn.Module)
        known = not isinstance(value, types.ModuleType)
        if known:
            self.tables[id(table)] = table
            self._owners[id(table)] = value
        names = self.names.union(_ALWAYS) if module else self.names
        if module and not self._is_looked_through(value):
            self.idle.update(id(table[t]) for t in TABLES if t in table and not table[t])
        if known and not module and (self._any_name or _is_looked_into(type(value))):
            names = names.union(table)
        names = names | {"forward"} if module else names
        for name in sorted(names & table.keys()):
            if not name.startswith("__") and name.isidentifier():
                self.slots.append(Slot(table, name, table[name]))
                self._at(table, f".get({name!r})", table[name], f"{path}.{name}".removeprefix("."))
        if not known:
            absent = [name for name in names if name not in table]
            self.slots += [Slot(table, name, ABSENT) for name in absent]
            return
        self.newcomers.append(Newcomers(table, frozenset(table)))
        inside = [table[t] for t in TABLES if t in table] if module else []
        for name, found in self._of_class(type(value)):
            if name not in table and not any(name in t for t in inside):
                self._inherited(value, table, name, path, found)

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
            if value is not ABSENT or asked(name) in self.names:
                found.append((name, value))
        self._inherits[cls, count] = found
        return found

    def _inherited(self, value: Any, table: dict[str, Any], name: str, path: str, found: Any) -> None:
        """A name that is not the object's own: its class may have it, and it may get it."""
        path = f"{path}.{name}".removeprefix(".")
        if isinstance(found, (*SIMPLE, Tensor)):
            self._at(value, f".{name}", found, path)
        elif found is not ABSENT:
            self.facts.append(Fact(table, f".get({name!r})", ABSENT, path, True))
        elif asked(name) in self.names:
            tables = [table.get(t) for t in TABLES] if isinstance(value, nn.Module) else []
            for where in (table, *(t for t in tables if t is not None)):
                self.idle.discard(id(where))
                self.facts.append(Fact(where, f".get({name!r})", ABSENT, path, True))


def _is_looked_into(cls: type) -> bool:
    """Does a class answer subscripts and names by code of its own?"""
    return any(isinstance(getattr(cls, n, None), types.FunctionType) for n in ("__getitem__", "__getattr__"))


def _file_of(cls: type) -> str | None:
    return getattr(sys.modules.get(cls.__module__), "__file__", "<unknown>")


def _rebuilt(now: Any, before: Any, originals: dict[int, Tensor]) -> bool:
    """Is this a list of what stands in for the tensors that were listed before?"""
    if type(now) is not list or type(before) is not list:
        return False
    return same([_original(v, originals) for v in now], before, inside=True)


def _original(value: Any, originals: dict[int, Tensor]) -> Any:
    """What a traced tensor (or a weak reference to one) stands for; anything else as it is."""
    if type(value) is weakref.ref:
        original = originals.get(id(value()))
        return value if original is None else weakref.ref(original)
    return originals.get(id(value), value)


@functools.cache
def _is_own_code(filename: str | None) -> bool:
    """Is this code whose globals may change: not a library's?"""
    if filename is None or not is_users(filename):
        return False
    return "site-packages" not in filename and not filename.startswith(inspect.__file__.rsplit("/", 1)[0])


def _is_written(value: Any) -> bool:
    """A method with source, not one that `dataclass` made."""
    return isinstance(value, types.FunctionType) and value.__code__.co_filename != "<string>"

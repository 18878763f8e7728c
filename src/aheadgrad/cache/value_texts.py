"""Python values as text that another process can compare: what a recording depended on, told completely.

    teller = Teller()
    teller.tell(value)        # the same text in another process means: the same value

A function is its code, its defaults and what it closes over; an object its class and its attributes. Classes
are told by name here and remembered (`classes`): `proof` compares what they hold. What has no such text
(a lock, an iterator, an object of an extension) raises `Unprovable`.
"""

from __future__ import annotations

import builtins
import logging
import operator
import os
import re
import struct
import sys
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from functools import cached_property, partial
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    EllipsisType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.cache.code import code_digest, codes_in, digest, whose
from aheadgrad.recording.compared_values import BY_TEXT, SIMPLE, Same
from aheadgrad.recording.containers import is_array, is_too_large
from aheadgrad.torchlayer.custom_ops import CustomOpDef, hidden, op_of, registered
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket

_BY_TEXT = {
    *SIMPLE,
    *BY_TEXT - {Decimal},  # what is computed with these depends on settings
    torch.layout,
    torch.memory_format,
    range,
    EllipsisType,
    GenericAlias,
    UnionType,
}
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_CONTAINERS = {*_SEQUENCES, dict, OrderedDict, defaultdict, object}  # of C, but nothing is hidden in them
_NUMBERS = (int, float, complex, str, bytes)
_OPEN = {*_CONTAINERS, *_NUMBERS, SimpleNamespace}
_BUILTINS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_OPS = (OpOverload, OpOverloadPacket, HigherOrderOperator)
_MOST = 50_000  # values, in one call's surroundings
_LARGE = 1 << 16  # bytes of a tensor
_CLASSES_OF_C = set(
    "abc builtins collections datetime enum functools itertools numpy operator pybind11_builtins re torch "
    "types typing weakref".split()
)
_HOLDERS = ("pybind11_", "PyCapsule")  # of functions
_FROM_SYS = tuple({type(v) for v in vars(sys).values() if isinstance(v, tuple)} - {tuple})
_MADE_BY_PYTHON = 1 << 9  # the flag of classes that are no part of the interpreter itself


DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType, ClassMethodDescriptorType, *_BUILTINS)
_FIELD: Any = type(vars(namedtuple("Field", "a"))["a"])
ASKING = {
    "getattr",
    "vars",
    "__getattribute__",
    "hasattr",
    "dir",
}  # attributes, by their names
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller, _FIELD)


class Unprovable(Exception):
    """Nothing can be said about whether this is the same in another process."""


class Teller:
    """Tells values; `known` has texts for objects that are checked elsewhere, by id.

    `codes` has the globals of all code that was told, by its digest; `classes` are all classes by name;
    `asked_for` are names that code need not have for attributes to be read: those in an `attrgetter`.
    """

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self.known = known or {}
        self.codes: dict[str, dict[str, Any]] = {}
        self.classes: dict[str, type] = {}
        self.asked_for: set[str] = set()
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []

    def copy(self) -> Teller:
        """One that has told the same."""
        made = Teller(self.known)
        made.codes, made.classes = dict(self.codes), dict(self.classes)
        made.asked_for = set(self.asked_for)
        made._numbers, made._held = dict(self._numbers), list(self._held)
        return made

    def tell(self, value: Any) -> str:
        kind = type(value)
        if kind in _BY_TEXT:
            return f"{kind.__name__} {value!r}" if value == value else f"{kind.__name__} {_bits(value)}"
        told = self.known.get(id(value))
        if told is not None:
            return told
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        number = self._numbers.get(id(value))
        if number is not None:
            return f"#{number}"
        self._numbers[id(value)] = len(self._held)
        self._held.append(value)  # the id stays its own
        if len(self._held) > _MOST:
            raise Unprovable("too many values to compare")
        return self._tell(kind, value)

    def _tell(self, kind: type, value: Any) -> str:
        for kinds, tell in _WAYS:
            if isinstance(value, kinds):
                return tell(self, value)
        if is_array(value):
            if is_too_large(value):
                raise Unprovable("a large numpy array")
            return f"array {value.dtype} {value.shape} {digest(value.tobytes().hex())}"
        if kind.__module__ == "typing" or is_ufunc(value) or _is_choice_of_torch(kind):
            return f"{kind.__name__} {value!r}"
        if kind.__module__ == "numpy" and kind.__name__ == "_ArrayFunctionDispatcher":
            return f"numpy {self.tell(value._implementation)}"
        return self._object(value)

    def _class(self, value: type) -> str:
        name = f"{value.__module__}.{value.__qualname__}"
        if name not in self.classes and _is_of_c(value):
            root = value.__module__.partition(".")[0]
            if root not in _CLASSES_OF_C or value.__module__.startswith("numpy.random"):
                raise Unprovable(f"a class that is written in C ({name})")
        if self.classes.setdefault(name, value) is not value:
            raise Unprovable(f"two classes are called {name}")
        return f"class {name}"

    def _parts(self, values: Any) -> str:
        return ", ".join([self.tell(v) for v in values])

    def _sequence(self, value: Any) -> str:
        most = f" {value.maxlen}" if isinstance(value, deque) else ""
        return f"{self._kind(value)}[{self._parts(value)}]{self._more(value)}{most}"

    def _set(self, value: Any) -> str:
        """With the hashes: what is made of it has an order that depends on them."""
        hashes = [hash(v) for v in value if not isinstance(v, int | float)]
        return f"{self._sequence(value)} {hashes}"

    def _op(self, value: Any) -> str:
        """Those of others than torch are told with what was registered for them in Python."""
        if unknown := hidden(value):
            raise Unprovable(f"a kernel that was registered in Python ({unknown[0]})")
        told = registered(value)
        return f"op {value} {self._parts(told)}" if told else f"op {value}"

    def _logger(self, value: logging.Logger) -> str:
        return f"logger {value.name} {value.getEffectiveLevel()} {value.disabled} {value.manager.disable}"

    def _mapping(self, value: dict[Any, Any]) -> str:
        return (
            f"{self._kind(value)}{{{self._parts(value)}: {self._parts(value.values())}}}{self._more(value)}"
        )

    def _kind(self, value: Any) -> str:
        return type(value).__name__ if type(value).__module__ == "builtins" else self._class(type(value))

    def _more(self, value: Any) -> str:
        """The attributes of an object. Raises if its class may keep something else, out of our sight."""
        kind = type(value)
        if kind in _CONTAINERS:
            return self.tell(value.default_factory) if kind is defaultdict else ""
        for one in kind.__mro__:
            if one not in _OPEN and _is_of_c(one):
                raise Unprovable(f"a {kind.__name__}")
        names = [n for k in kind.__mro__ for n in _slots(k)]
        held = [(n, getattr(value, n)) for n in names if hasattr(value, n)]
        more = [value.default_factory] if isinstance(value, defaultdict) else []
        return self._parts([*held, *more, *getattr(value, "__dict__", {}).items()])

    def _function(self, f: FunctionType) -> str:
        code = f.__code__
        owner = whose(code.co_filename)
        closed_over = [cell.cell_contents for cell in f.__closure__ or () if _is_full(cell)]
        held = self._parts(closed_over)
        if owner:
            return f"{owner} {f.__module__}.{f.__qualname__}:{code.co_firstlineno} ({held})"
        self.codes.update(dict.fromkeys(map(code_digest, codes_in(code)), f.__globals__))
        given = self._parts(
            [f.__defaults__, f.__kwdefaults__, f.__dict__, f.__name__, f.__module__, f.__doc__]
        )
        return f"function {code_digest(code)} ({held}) {given}"

    def _builtin(self, f: Any) -> str:
        holder = getattr(f, "__self__", None)
        unbound = (
            holder is None or isinstance(holder, ModuleType) or type(holder).__name__.startswith(_HOLDERS)
        )
        inside = "" if unbound else self.tell(holder)
        self.asked_for |= {f.__name__} & ASKING
        module = str(
            getattr(f, "__module__", None) or getattr(getattr(f, "__objclass__", None), "__module__", "")
        )
        return f"builtin {module}.{f.__qualname__} {version_of(module)} {inside}"

    def _getter(self, value: Any) -> str:
        given = value.__reduce__()[1]
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            self.asked_for |= {part for name in given if type(name) is str for part in name.split(".")}
        return f"{type(value).__name__} {self._parts(given)}"

    def _object(self, value: Any) -> str:
        return f"{self._class(type(value))} {self._more(value)}"

    def _number(self, value: Any) -> str:
        """One of a class of its own."""
        base = next(kind for kind in _NUMBERS if isinstance(value, kind))
        return f"{self._class(type(value))} {base.__repr__(value)} {self._more(value)}"

    def _tensor(self, value: Tensor) -> str:
        """A small one that nobody has looked at as a tensor."""
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.device.type != "cpu" or value.numel() * value.element_size() > _LARGE:
            raise Unprovable("a tensor that is no argument, and is not held by a module or by name")
        flags = value.dtype, tuple(value.shape), value.stride(), value.requires_grad
        inside = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
        return f"tensor {flags} {digest(str(inside))}"

    def _cannot(self, value: Any) -> str:
        raise Unprovable(f"a {type(value).__name__}")


def _is_of_c(kind: type) -> bool:
    """Was a class written in C? Its own methods are descriptors then."""
    return not kind.__flags__ & _MADE_BY_PYTHON or any(
        isinstance(member, MethodDescriptorType | WrapperDescriptorType) and member.__objclass__ is kind
        for member in vars(kind).values()
    )


def is_ufunc(value: Any) -> bool:
    """Is it one of numpy's own?"""
    numpy = sys.modules.get("numpy")
    kind = getattr(numpy, "ufunc", ())
    return isinstance(value, kind) and getattr(numpy, value.__name__, None) is value


def _is_choice_of_torch(kind: Any) -> bool:
    """Is it an enumeration that is written in C?"""
    return str(kind.__module__).startswith("torch") and hasattr(kind, "__members__")


def _bits(value: Any) -> str:
    """A NaN, which has a sign."""
    whole = complex(value)
    return struct.pack("dd", whole.real, whole.imag).hex()


def _slots(kind: type) -> Iterator[str]:
    names = vars(kind).get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        if name not in ("__dict__", "__weakref__"):
            yield (
                f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            )


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def version_of(module: str) -> str:
    """The version of an extension, and of its file; torch's and Python's are told elsewhere."""
    root = module.partition(".")[0]
    if root in _STANDARD:
        return ""
    file = getattr(sys.modules.get(module), "__file__", None)
    told = os.stat(file) if file else None
    version = str(getattr(sys.modules.get(root), "__version__", ""))
    return f"{version} {told and (told.st_size, told.st_mtime_ns)}"


_STANDARD = {*sys.stdlib_module_names, "builtins", "torch"}
_WAYS: tuple[tuple[Any, Callable[[Teller, Any], str]], ...] = (
    (Same, lambda t, v: t.tell(v.value)),
    (Tensor, Teller._tensor),
    (dict, Teller._mapping),
    (_FROM_SYS, lambda t, v: f"{type(v).__name__} {t._parts(tuple(v))}"),
    ((set, frozenset), Teller._set),
    (_SEQUENCES, Teller._sequence),
    (FunctionType, Teller._function),
    (MethodType, lambda t, v: f"method {t.tell(v.__func__)} {t.tell(v.__self__)}"),
    (_BUILTINS, Teller._builtin),
    (partial, lambda t, v: f"partial {t._parts((v.func, v.args, v.keywords))}"),
    (Enum, lambda t, v: f"{t._class(type(v))} {v.name} {t.tell(v.value)}"),
    (property, lambda t, v: f"property {t._parts((v.fget, v.fset, v.fdel))}"),
    (cached_property, lambda t, v: f"cached {t.tell(v.func)}"),
    ((staticmethod, classmethod), lambda t, v: f"{type(v).__name__} {t.tell(v.__func__)}"),
    (CodeType, lambda t, v: f"code {code_digest(v)}"),
    (_OPS, Teller._op),
    (logging.Logger, Teller._logger),  # what is logged is no part of a result
    (weakref.ref, lambda t, v: f"ref {t.tell(v())}"),
    (nn.Module, Teller._cannot),
    (CustomOpDef, lambda t, v: t.tell(op_of(v))),
    (DESCRIPTORS, lambda t, v: f"{type(v).__name__} {v!r}"),
    (_GETTERS, Teller._getter),
    (_NUMBERS, Teller._number),
    (bytearray, lambda t, v: f"bytearray {bytes(v)!r}"),
    (MappingProxyType, lambda t, v: f"proxy {t.tell(dict(v))}"),
    (slice, lambda t, v: f"slice {t._parts((v.start, v.stop, v.step))}"),
    (re.Pattern, lambda t, v: f"pattern {v.pattern!r} {v.flags}"),
)
BUILTINS = vars(builtins)

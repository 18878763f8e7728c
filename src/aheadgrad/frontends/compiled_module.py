"""A compiled module: the original in everything but the call, which runs compiled.

Every attribute is the original's, and what is set here is set there. A method of the user's runs as it is,
bound to the compiled module, so that `self(x)` in it is a compiled call. Python looks up special methods
(`len(m)`, `m[0]`) on the class, so each class of modules gets a class of compiled ones that passes those on.
A method that returns the module itself (`to`, `train`) returns the compiled one. Reports (`entries`, `source`)
are ours where the original has nothing under that name.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from aheadgrad.frontends.compiled import MISS, CompiledFunction
from aheadgrad.options import Options
from aheadgrad.torchlayer.evalframe import hide_from_dynamo
from aheadgrad.torchlayer.modules import call_is_forward

_get = object.__getattribute__

_OURS = {"__dict__", "__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__", "__call__", "forward"}
_NOT_PASSED_ON = _OURS | {"__init__", "__new__", "__del__", "__init_subclass__", "__class_getitem__"}
_NOT_PASSED_ON |= {"__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__getstate__"}
_NOT_PASSED_ON |= {"__setstate__", "__slots__", "__weakref__", "__subclasshook__", "__set_name__"}
_ALWAYS_PASSED_ON = ("__repr__", "__dir__")
_OF_ANY_MODULE = frozenset(
    name for name, v in vars(nn.Module).items() if isinstance(v, types.FunctionType) and name[:2] != "__"
)
_classes: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()


class CompiledModule(nn.Module):
    """Stands for the original module; see above."""

    __slots__ = ("_compiled",)

    def __new__(cls, original: nn.Module, compiled: CompiledFunction) -> CompiledModule:
        made: CompiledModule = object.__new__(_class_for(cls, type(original)))
        return made

    def __init__(self, original: nn.Module, compiled: CompiledFunction) -> None:
        own = _get(self, "__dict__")
        for name, value in original.__dict__.items():  # for those who look into a module's dictionary
            if name.startswith("_") and isinstance(value, dict | set):
                own[name] = value
        own["_original"] = original
        object.__setattr__(self, "_compiled", compiled)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        compiled = _compiled_of(self)
        for call in compiled.calls:  # as `TracedFunction.__call__`, without the way there
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return compiled.miss(args, kwargs)

    @property
    def forward(self) -> Any:  # type: ignore[override]
        """Compiled where it is the same as calling the module; hooks belong to the call alone."""
        original = _original_of(self)
        if not call_is_forward(original):
            return original.forward

        @functools.wraps(original.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return forward

    def __getattribute__(self, name: str) -> Any:
        if name in _OURS:
            return _get(self, name)
        original = _original_of(self)
        try:
            value = getattr(original, name)
        except AttributeError:
            try:
                return _get(self, name)
            except AttributeError:
                pass
            raise
        if not isinstance(value, types.MethodType) or value.__self__ is not original:
            return value
        return _returning(self, original, value) if name in _OF_ANY_MODULE else _bound(self, value)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_original_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_original_of(self), name)

    def __copy__(self) -> CompiledModule:
        return _again(type(self), copy.copy(_original_of(self)), *_kind_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        return _again(type(self), copy.deepcopy(_original_of(self), memo), *_kind_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The original and how it was compiled; entries are made anew."""
        return _again, (_known_class(type(self)), _original_of(self), *_kind_of(self))

    @property
    def source(self) -> str:
        return _compiled_of(self).source

    @property
    def fallbacks(self) -> Any:
        return _compiled_of(self).fallbacks

    @property
    def breaks(self) -> Any:
        return _compiled_of(self).breaks

    @property
    def entries(self) -> Any:
        return _compiled_of(self).entries

    @property
    def misses(self) -> Any:
        return _compiled_of(self).misses

    def explain(self) -> str:
        return _compiled_of(self).explain()


hide_from_dynamo(CompiledModule.__call__)

_compiled_of: Callable[[CompiledModule], CompiledFunction] = vars(CompiledModule)["_compiled"].__get__


def _original_of(module: CompiledModule) -> nn.Module:
    original: nn.Module = _get(module, "__dict__")["_original"]
    return original


def _kind_of(module: CompiledModule) -> tuple[type[CompiledFunction], Options]:
    return type(_compiled_of(module)), _compiled_of(module).options


def _again(
    kind: type, original: nn.Module, frontend: type[CompiledFunction], options: Options
) -> CompiledModule:
    made: CompiledModule = _known_class(kind)(original, frontend(original, options))
    return made


def _known_class(kind: type) -> type:
    """The class under a name that can be imported, for one that was made by `_class_for`."""
    return next(base for base in kind.__mro__ if "_made" not in vars(base))


def _returning(module: CompiledModule, original: nn.Module, method: Any) -> Any:
    """The method, bound to the compiled module and with it in the place of the original as its result."""

    @functools.wraps(method.__func__)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        return module if out is original else out

    return types.MethodType(call, module)


def _bound(module: CompiledModule, method: types.MethodType) -> Any:
    """A method of the user's with the compiled module as its `self`."""
    return types.MethodType(method.__func__, module)


def _class_for(kind: type[CompiledModule], original: type) -> type:
    """The class of compiled modules for a class of modules."""
    known = _classes.setdefault(original, {})
    if kind not in known:
        members: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        members.update(__slots__=(), _made=True)
        for name in _specials(original):
            members[name] = None if getattr(original, name) is None else _passed_on(name)
        known[kind] = type(kind.__name__, (kind,), members)
    return known[kind]


def _specials(original: type) -> list[str]:
    """The special methods that a class of modules has of its own."""
    found = dict.fromkeys(_ALWAYS_PASSED_ON)
    for base in original.__mro__[: original.__mro__.index(nn.Module)]:
        special = (n for n, v in vars(base).items() if n.startswith("__") and n.endswith("__"))
        found.update(dict.fromkeys(n for n in special if callable(vars(base)[n]) or n == "__hash__"))
    return [name for name in found if name not in _NOT_PASSED_ON and name != "__class__"]


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: CompiledModule, /, *args: Any, **kwargs: Any) -> Any:
        original = _original_of(self)
        out = getattr(type(original), name)(original, *args, **kwargs)
        return self if out is original else out

    method.__name__ = name
    return method

"""A compiled module: the original in everything but the call, which runs compiled.

It is an object of a subclass of the original's class, made on the spot, and the two share one dictionary of
attributes. So parameters, hooks, `state_dict`, special methods and methods of the user's are there, and
what is set on one is set on the other. A method runs as it is with the compiled module as its `self`, so that
`self(x)` in it is a compiled call. Reports (`entries`, `source`) are ours unless the module has such a name.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from aheadgrad.frontends.compiled import MISS, CompiledFunction
from aheadgrad.options import Options
from aheadgrad.torchlayer.evalframe import hide_from_dynamo
from aheadgrad.torchlayer.modules import call_is_forward

_REPORTS = ("entries", "source", "misses", "fallbacks", "transforms", "breaks", "explain", "memory")
_set_class: Callable[[Any, type], None] = vars(object)["__class__"].__set__


class CompiledModule:
    """Stands for the original module; `CompiledModule(original, compiled)`."""

    __slots__ = ("_aheadgrad_compiled",)
    _aheadgrad_compiled: CompiledFunction

    def __new__(cls, original: nn.Module, compiled: CompiledFunction) -> CompiledModule:
        made: CompiledModule = object.__new__(_class_for(cls, type(original)))  # type: ignore[arg-type]
        object.__setattr__(made, "__dict__", original.__dict__)
        object.__setattr__(made, "_aheadgrad_compiled", compiled)
        return made

    def __init__(self, original: nn.Module, compiled: CompiledFunction) -> None:
        """The original is initialized already."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        compiled = self._aheadgrad_compiled
        if is_dynamo_compiling():
            return compiled._fn(*args, **kwargs)
        for call in compiled.calls:  # as `TracedFunction.__call__`, without the way there
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return compiled.miss(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What is found in no other way: the module's own tables, then reports."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name not in _REPORTS:
                raise
        return getattr(self._aheadgrad_compiled, name)

    def __dir__(self) -> list[str]:
        return dir(original_of(self))

    def __del__(self) -> None:
        """What the original's class does at its end is for the original."""

    def __copy__(self) -> Any:
        return _again(copy.copy(original_of(self)), *_kind_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _again(copy.deepcopy(original_of(self), memo), *_kind_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The original and how it was compiled; entries are made anew."""
        return _again, (original_of(self), *_kind_of(self))


hide_from_dynamo(CompiledModule.__call__)


def original_of(module: CompiledModule) -> nn.Module:
    original: nn.Module = module._aheadgrad_compiled._fn
    return original


def _kind_of(module: CompiledModule) -> tuple[type, type[CompiledFunction], Options]:
    compiled = module._aheadgrad_compiled
    return type(module).__bases__[0], type(compiled), compiled.options


def _again(original: nn.Module, kind: type, frontend: type[CompiledFunction], options: Options) -> Any:
    return kind(original, frontend(original, options))


@functools.cache
def _class_for(kind: type, original: type) -> type:
    """The class of compiled modules for a class of modules."""

    @functools.wraps(getattr(original, "forward", nn.Module.forward))  # (TorchScript has none yet)
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compiled where it is the same as calling the module; hooks belong to the call alone."""
        module = original_of(self)
        return self(*args, **kwargs) if call_is_forward(module) else module.forward(*args, **kwargs)

    def become(self: Any, new: type) -> None:
        original_of(self).__class__ = new
        _set_class(self, _class_for(kind, new))

    shown = property(lambda self: type(original_of(self)), become)
    members = {"__slots__": (), "forward": forward, "__class__": shown}
    members.update(__module__=original.__module__, __qualname__=original.__qualname__)
    return types.new_class(original.__name__, (kind, original), exec_body=lambda ns: ns.update(members))

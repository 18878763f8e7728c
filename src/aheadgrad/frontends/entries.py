"""A compiled callable and its entries.

Each entry states what it assumes; a call takes the first entry whose assumptions hold, or makes
a new one.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from aheadgrad import pipeline
from aheadgrad.capture.lift import Lift
from aheadgrad.capture.origins import is_users
from aheadgrad.capture.stage import Captured
from aheadgrad.errors import FallbackError, FallbackWarning, RecompileWarning
from aheadgrad.frontends import misses
from aheadgrad.frontends import module as modules
from aheadgrad.frontends.function import Flat, flatten, make_call, parameter_names
from aheadgrad.frontends.guards import MISS
from aheadgrad.frontends.making import Guarded, Making
from aheadgrad.frontends.misses import Miss
from aheadgrad.frontends.refused import Refused, look_of_call
from aheadgrad.frontends.shapes import Shapes
from aheadgrad.frontends.undo import Undo
from aheadgrad.options import Options
from aheadgrad.report.journal import Journal
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import (
    active_function_modes,
    default_devices,
    dual_level,
    transform_level,
)
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import is_wrapped

_FULL = "the limit of entries is reached"
_TOO_DEEP = "the arguments, or what the function reaches, are nested too deeply to be recorded"
_UNCHECKED = "a property of the arguments cannot be checked"


class Compiled:
    """What `aheadgrad.compile` returns for a function.

    `entries` are what was compiled so far, `fallbacks` counts calls that ran uncompiled by reason,
    `misses` says why each entry after the first was made.
    """

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._module = fn if isinstance(fn, nn.Module) else None
        self.options = options
        self.entries: list[Guarded] = []
        self.calls: list[Callable[..., Any]] = []
        self.fallbacks: dict[str, int] = {}
        self.misses: list[Miss] = []
        self._shapes = Shapes(options.dynamic)
        self._lock = threading.RLock()
        self._full = False
        self._refused = Refused(options.max_entries)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        for call in self.calls:
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return self.miss(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """As of the function itself: one with nothing to copy is shared. Entries are made anew."""
        fn = copy.deepcopy(self._fn, memo)
        return self if fn is self._fn else Compiled(fn, self.options)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By name where the name leads here, as functions; otherwise the function and the options."""
        name = str(getattr(self, "__qualname__", ""))
        found: Any = sys.modules.get(str(getattr(self, "__module__", "")))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Compiled, (self._fn, self.options))

    @property
    def source(self) -> str:
        """The generated code of all entries."""
        return "\n\n".join(f"# entry {i}\n{g.source}" for i, g in enumerate(self.entries))

    def explain(self) -> str:
        """What was captured and decided, entry by entry."""
        from aheadgrad.report.text import explain_entry

        if not self.entries:
            return "Nothing is compiled yet: call the function first."
        return "\n\n".join(explain_entry(i, g.entry) for i, g in enumerate(self.entries))

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            leaves = pytree.tree_leaves((args, kwargs))
        except RecursionError:
            return self._run_uncompiled(_TOO_DEEP, args, kwargs)
        if _inside_another_trace(leaves):
            return self._fn(*args, **kwargs)
        if default_devices() is None:
            reason = "a TorchFunctionMode around the call wants to see each function"
            return self._run_uncompiled(reason, args, kwargs)
        if self._full:
            if misses.someone_listens():
                self._explain_miss(args, kwargs)
            return self._run_uncompiled(_FULL, args, kwargs)
        look = look_of_call(args, kwargs, leaves, self._fn)
        refused = self._refused.reason(look)
        if refused is not None:
            return self._run_uncompiled(refused, args, kwargs)
        with self._lock:
            for guarded in self.entries:  # another thread may have compiled what this one needs
                out = guarded.call(args, kwargs)
                if out is not MISS:
                    return out
            miss = self._explain_miss(args, kwargs)
            if len(self.entries) >= self.options.max_entries:
                return self._too_many(args, kwargs, miss)
            try:
                guarded = self._compile(args, kwargs)
            except FallbackError as error:
                if error.has_run:
                    self._refused.note(look, error.reason)
                return self._run_uncompiled(error.reason, args, kwargs, error)
            except RecursionError:  # recording adds to the depth of the stack: eager may get by
                self._refused.note(look, _TOO_DEEP)
                return self._run_uncompiled(_TOO_DEEP, args, kwargs)
            self.entries.append(guarded)
            self.calls.append(guarded.call)
            if miss is not None:
                self.misses.append(miss)
        out = guarded.call(args, kwargs)
        return self._run_uncompiled(_UNCHECKED, args, kwargs) if out is MISS else out

    def _explain_miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Miss | None:
        miss = misses.closest(self._name, [g.why for g in self.entries], args, kwargs)
        if miss is not None:
            misses.tell(miss)
        return miss

    @property
    def _name(self) -> str:
        return str(getattr(self._fn, "__name__", type(self._fn).__name__))

    def _too_many(self, args: tuple[Any, ...], kwargs: dict[str, Any], miss: Miss | None) -> Any:
        self._full = True
        changing = misses.what_keeps_changing([*self.misses, *([miss] if miss else [])])
        warnings.warn(
            f"{self._name} was compiled {len(self.entries)} times for different calls; further ones run "
            f"uncompiled. What keeps changing: {changing}. Raise max_entries "
            f"(now {self.options.max_entries}), or keep shapes and Python arguments the same.",
            RecompileWarning,
            stacklevel=_level_of_caller(),
        )
        return self._run_uncompiled(_FULL, args, kwargs, told=True)

    def _run_uncompiled(
        self,
        reason: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception | None = None,
        *,
        told: bool = False,
    ) -> Any:
        if self.options.fallback == "error":
            raise error or FallbackError(reason)
        if reason not in self.fallbacks and not told:
            text = f"aheadgrad runs this call uncompiled: {reason}."
            warnings.warn(text, FallbackWarning, stacklevel=_level_of_caller())
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        return self._fn(*args, **kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guarded:
        """A new entry; if that fails with symbols for sizes, one with numbers, or the error eager raises."""
        target = self._module.forward if self._module is not None else self._fn
        flat = flatten(args, kwargs, _names(target))
        symbols = self._shapes.symbols(flat)
        try:
            guarded = self._compile_flat(flat, args, kwargs, symbols)
        except Exception:
            if symbols is None:
                raise
            misses.LOG.debug("%s is compiled with numbers for sizes", self._name, exc_info=True)
            guarded = self._compile_flat(flat, args, kwargs, None)
        self._shapes.note(flat)
        return guarded

    def _compile_flat(
        self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols | None
    ) -> Guarded:
        """One try; where the function is going to run once more, Python is as it was before."""
        making = Making(self._fn, self._name, flat, self.options)
        undo = Undo(making.reach, flat.leaves)
        try:
            guarded = making.run(args, kwargs, symbols, undo)
            if guarded.check(args, kwargs) is MISS:
                raise FallbackError(_UNCHECKED)
        except Exception as error:
            if isinstance(error, FallbackError | RecursionError) or symbols is not None:
                undo.put_back()
            if isinstance(error, FallbackError):
                error.has_run = making.has_run
            raise
        return guarded


def _level_of_caller() -> int:
    """The `stacklevel` for a warning from the function that asks, so that it names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _names(target: Any) -> list[str]:
    names = parameter_names(target)
    return names[1:] if hasattr(target, "__self__") and names else names


def _inside_another_trace(leaves: list[Any]) -> bool:
    """Under a transform, or inside another capture: run the function itself."""
    if transform_level() is not None or dual_level() >= 0:
        return True
    if default_devices() is None and any(map(_is_tracing, active_function_modes())):
        return True
    return any(isinstance(v, Tensor) and (isinstance(v, FakeTensor) or is_wrapped(v)) for v in leaves)


def _is_tracing(mode: Any) -> bool:
    """Another capture of ours, or one of torch's own."""
    return isinstance(mode, Lift) or type(mode).__module__.startswith("torch.fx.")


def capture(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Captured:
    """Stops after the joint program."""
    places = modules.holders(fn) if isinstance(fn, nn.Module) else []
    target = fn.forward if isinstance(fn, nn.Module) else fn
    flat = flatten(args, kwargs, _names(target))

    def around(see: Callable[[Any], Any]) -> Any:
        return modules.swapped(places, see) if places else nullcontext()

    call = make_call(fn, flat, [(p.slot, p.get()) for p in places], around)
    return pipeline.run_capture(call, options, Journal())

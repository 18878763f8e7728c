"""The front end that records one run of the function; the contract is in docs/tracing.md.

Each entry states what it assumes; a call takes the first entry whose assumptions hold, or makes a new one.
What cannot be recorded runs uncompiled, with its reason.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from aheadgrad.errors import (
    AheadgradError,
    DataDependentError,
    FallbackError,
    InvalidOption,
    InvalidProgram,
    RecompileWarning,
    reason_of,
)
from aheadgrad.frontends import misses
from aheadgrad.frontends.compiled import MISS, CompiledFunction, runs_the_original
from aheadgrad.frontends.function import Flat, flatten, parameter_names
from aheadgrad.frontends.making import Guarded, Making
from aheadgrad.frontends.misses import Miss
from aheadgrad.frontends.shapes import Shapes
from aheadgrad.options import Options
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autocast import autocast_state
from aheadgrad.torchlayer.autograd import is_view
from aheadgrad.torchlayer.dispatch import default_devices
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.lock import RECORDING

_FULL = "the limit of entries is reached"
_TOO_DEEP = "the arguments are nested too deeply to be recorded"
_UNCHECKED = "a property of the arguments cannot be checked"
_WATCHED = "a TorchFunctionMode around the call wants to see each function"
_CHOOSE = (str, bool, type(None), torch.dtype, torch.device)  # values that code chooses its way by


class TracedFunction(CompiledFunction):
    """A function recorded by running it."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        super().__init__(fn, options)
        self._shapes = Shapes(options.dynamic, fn)
        self._full = False
        self._refused: dict[Any, Exception] = {}  # by what calls look like from afar
        self._warned_of: set[Any] = set()  # looks of calls that changed something, once

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._fn(*args, **kwargs)
        for call in self.calls:
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return self.miss(args, kwargs)

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no entry fits: compiled now, or run as it is."""
        try:
            leaves = pytree.tree_leaves((args, kwargs))
        except RecursionError:
            return self._uncompiled(_TOO_DEEP, args, kwargs)
        if runs_the_original() or any(map(_is_traced, leaves)):
            return self._fn(*args, **kwargs)
        if default_devices() is None:
            return self._uncompiled(_WATCHED, args, kwargs)
        if self._full:
            if misses.someone_listens():
                self._explain(args, kwargs)
            return self._uncompiled(_FULL, args, kwargs)
        seen = _from_afar(args, kwargs, leaves, self._fn)
        made: Any = self._refused.get(seen)
        if made is None and len(self._refused) >= self.options.max_entries:
            made = FallbackError("calls of other kinds were refused too often")
        if made is not None:
            return self._refuse(made, args, kwargs)
        with RECORDING:  # another recording may have the module's parameters replaced for the moment
            for entry in self.entries:  # another thread may have compiled what this one needs
                out = entry.call(args, kwargs)
                if out is not MISS:
                    return out
            flat = self._flat(args, kwargs)
            miss = self._explain(args, kwargs)
            if len(self.entries) >= self.options.max_entries:
                self._too_many(miss)
            else:
                made = self._try(flat, args, kwargs, seen)
            if isinstance(made, Guarded):
                self.entries.append(made)
                self.calls.append(made.call)
                if miss is not None:
                    self.misses.append(miss)
                return made.call(args, kwargs)
        return self._fn(*args, **kwargs) if made is None else self._refuse(made, args, kwargs)

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
        return flatten(args, kwargs, parameter_names(self._fn))

    def _explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Miss | None:
        miss = misses.explain(self.name, [e.why for e in self.entries], args, kwargs)
        if miss is not None:
            misses.tell(miss)
        return miss

    def _too_many(self, miss: Miss | None) -> None:
        self._full = True
        if self.options.fallback == "error":
            raise FallbackError(_FULL)
        self.fallbacks.count(_FULL)
        changing = misses.what_keeps_changing([*self.misses, *([miss] if miss else [])])
        warnings.warn(
            f"{self.name} was compiled {len(self.entries)} times for different calls; further ones run "
            f"uncompiled. What keeps changing: {changing}. Raise max_entries "
            f"(now {self.options.max_entries}), or keep shapes and Python arguments the same.",
            RecompileWarning,
            stacklevel=stacklevel_of_user(),
        )

    def _uncompiled(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.note_uncompiled(reason)
        return self._fn(*args, **kwargs)

    def _refuse(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs what could not be recorded in eager, which shows whether the function itself is at fault."""
        if self.options.fallback == "error" or isinstance(error, InvalidProgram | InvalidOption):
            raise error.with_traceback(None) if isinstance(error, AheadgradError) else error
        if isinstance(error, AheadgradError):
            self.note_uncompiled(*_why(error))
            return self._fn(*args, **kwargs)
        out = self._fn(*args, **kwargs)
        self.note_uncompiled(f"recording it raises {reason_of(error)}")
        return out

    def _try(
        self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Any
    ) -> Guarded | Exception:
        """A new entry, with numbers if it fails with symbols for sizes; or why there is none."""
        for symbols in self._shapes.choices(flat):
            try:
                made = self._record(flat, args, kwargs, symbols)
            except Exception as error:
                if symbols is None:
                    return self._remember(error, seen)
                misses.LOG.debug("%s is compiled with fewer symbols", self.name, exc_info=True)
                self._shapes.give_up_numbers(flat, symbols)
            else:
                break
        self._shapes.note(flat)
        return made

    def _remember(self, error: Exception, seen: Any) -> Exception:
        """Nobody tries again at each call; but what changes something once may be done with that."""
        if isinstance(error, AheadgradError) and getattr(error, "has_run", False):
            if not getattr(error, "once", False) or seen in self._warned_of:
                self._refused[seen] = copy.copy(error)  # without the frames, which hold tensors
            self._warned_of.add(seen)
        return FallbackError(_TOO_DEEP) if isinstance(error, RecursionError) else error

    def _record(
        self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols | None
    ) -> Guarded:
        making = Making(self._fn, self.name, flat, self.options)
        try:
            made = making.run(args, kwargs, symbols)
            if made.check(args, kwargs) is MISS:
                raise FallbackError(_UNCHECKED)
        except Exception as error:
            making.put_back()
            if isinstance(error, AheadgradError):
                error.has_run = making.has_run
            raise
        return made


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tensor) and (isinstance(value, FakeTensor) or is_wrapped(value))


def _why(error: AheadgradError) -> tuple[str, str]:
    """Why a call runs uncompiled, and the line of the user's if one is known."""
    reason = reason_of(error)
    if isinstance(error, DataDependentError):
        reason = 'a tensor\'s value decides what to do; frontend="dynamo" compiles around such a line'
    lines = (line.removeprefix("  at ") for line in str(error).splitlines() if line.startswith("  at "))
    return reason, next(lines, "")


def _from_afar(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], fn: Any) -> Any:
    """What a call looks like from afar: sizes and numbers, which change from call to call, do not count."""

    def look(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (
                type(value),
                value.dtype,
                value.device,
                value.dim(),
                value.requires_grad,
                value.is_leaf,
                is_view(value),
            )
        return type(value), value if type(value) in _CHOOSE else None

    outside = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), repr(autocast_state())
    kinds = tuple(map(type, args)), tuple((key, type(v)) for key, v in kwargs.items())
    return outside, getattr(fn, "training", None), kinds, tuple(map(look, leaves))

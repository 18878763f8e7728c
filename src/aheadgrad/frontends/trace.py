"""The front end that records one run of the function; the contract is in docs/tracing.md.

Each entry states what it assumes; a call takes the first entry whose assumptions hold, or makes a new one.
What cannot be recorded runs uncompiled, with its reason.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import MISTAKES, AheadgradError, DataDependentError, FallbackError, reason_of
from aheadgrad.frontends import misses
from aheadgrad.frontends.compiled import FULL, MISS, CompiledFunction, runs_the_original
from aheadgrad.frontends.function import Flat, flatten, parameter_names
from aheadgrad.frontends.guards import Guarded
from aheadgrad.frontends.making import Making
from aheadgrad.frontends.shapes import Shapes
from aheadgrad.options import Options
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autocast import autocast_state
from aheadgrad.torchlayer.autograd import is_view
from aheadgrad.torchlayer.dispatch import default_devices
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.lock import RECORDING

_TOO_DEEP = "the arguments are nested too deeply to be recorded"
_UNCHECKED = "a property of the arguments cannot be checked"
_WATCHED = "a TorchFunctionMode around the call wants to see each function"
_TOO_OFTEN = "calls of other kinds were refused too often"
_CHOOSE = (str, bool, type(None), torch.dtype, torch.device)  # values that code chooses its way by


class TracedFunction(CompiledFunction):
    """A function recorded by running it."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        super().__init__(fn, options)
        self._shapes = Shapes(options.dynamic, fn)
        self._full = False
        self._refused: dict[Any, Exception] = {}  # by what calls look like from afar
        self._changed_once: set[Any] = set()  # looks of calls that changed something, and may be done with it

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no entry fits: compiled now, or run as it is."""
        try:
            leaves = pytree.tree_leaves((args, kwargs))
        except RecursionError:
            return self._uncompiled(FallbackError(_TOO_DEEP), args, kwargs)
        if runs_the_original() or any(map(_is_traced, leaves)):
            return self._fn(*args, **kwargs)
        if default_devices() is None:
            return self._uncompiled(FallbackError(_WATCHED), args, kwargs)
        if self._full:
            if misses.someone_listens():
                misses.explain(self.name, self.entries, args, kwargs)
            return self._uncompiled(FallbackError(FULL), args, kwargs)
        look = _from_afar(args, kwargs, leaves, self._fn)
        refused = self._refused.get(look)
        if refused is None and len(self._refused) >= self.options.max_entries:
            refused = FallbackError(_TOO_OFTEN)
        if refused is None:
            with RECORDING:  # another recording may have the module's parameters replaced for the moment
                for call in self.calls:  # another thread may have compiled what this one needs
                    out = call(args, kwargs)
                    if out is not MISS:
                        return out
                made = self._make(args, kwargs, look)
                if isinstance(made, Guarded):
                    return made.call(args, kwargs)
                refused = made
        return self._uncompiled(refused, args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any], look: Any) -> Guarded | Exception:
        """A new entry, with fewer symbols if that fails; or why there is none."""
        found = misses.explain(self.name, self.entries, args, kwargs)
        if len(self.entries) >= self.options.max_entries:
            self._full = True
            self.misses += found
            return FallbackError(FULL)
        flat = flatten(args, kwargs, parameter_names(self._fn))
        for symbols in self._shapes.choices(flat):
            try:
                made = self._record(flat, args, kwargs, symbols)
                break
            except Exception as error:
                if symbols is None:
                    return self._remember(error, look)
                misses.LOG.debug("%s is compiled with fewer symbols", self.name, exc_info=True)
        self._shapes.note(flat)
        self.entries.append(made)
        self.calls.append(made.call)
        self.misses += found
        return made

    def _record(self, flat: Flat, args: Any, kwargs: Any, symbols: Symbols | None) -> Guarded:
        making = Making(self._fn, self.name, flat, self.options)
        try:
            made = making.run(args, kwargs, symbols)
            if made.check(args, kwargs) is MISS:
                raise FallbackError(_UNCHECKED)
            return made
        except Exception as error:
            making.put_back()
            if isinstance(error, AheadgradError):
                error.has_run = making.has_run
            raise

    def _remember(self, error: Exception, look: Any) -> Exception:
        """Nobody tries again at each call; but what changes something once may be done with that."""
        if isinstance(error, AheadgradError) and error.has_run:
            if error.once and look not in self._changed_once:
                self._changed_once.add(look)
            else:
                self._refused[look] = copy.copy(error)  # without the frames, which hold tensors
        return FallbackError(_TOO_DEEP) if isinstance(error, RecursionError) else error

    def _uncompiled(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs what is not compiled in eager, which shows whether the function itself is at fault."""
        ours = isinstance(error, AheadgradError)
        if self.options.fallback == "error" or isinstance(error, MISTAKES):
            raise error.with_traceback(None) if ours else error
        if ours:
            self.note_uncompiled(_why(error))
        out = self._fn(*args, **kwargs)
        if not ours:
            self.note_uncompiled(f"recording it raises {reason_of(error)}")
        return out


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tensor) and (isinstance(value, FakeTensor) or is_wrapped(value))


def _why(error: Exception) -> str:
    """Why a call runs uncompiled, with the line of the user's if one is known."""
    reason = reason_of(error)
    if isinstance(error, DataDependentError):
        reason = 'a tensor\'s value decides what to do; frontend="dynamo" compiles around such a line'
    line = re.search(r"^  at (.*)$", str(error), re.MULTILINE)
    return reason if line is None else f"{reason} ({line[1]})"


def _from_afar(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], fn: Any) -> Any:
    """What a call looks like from afar: sizes and numbers, which change from call to call, do not count."""

    def look(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return type(value), value if type(value) in _CHOOSE else None
        history = value.requires_grad, value.is_leaf, is_view(value)
        return type(value), value.dtype, value.device, value.dim(), history

    outside = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), repr(autocast_state())
    kinds = tuple(map(type, args)), tuple((key, type(v)) for key, v in kwargs.items())
    return outside, getattr(fn, "training", None), kinds, tuple(map(look, leaves))

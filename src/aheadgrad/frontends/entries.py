"""A compiled callable and its entries.

Each entry states what it assumes; a call takes the first entry whose assumptions hold, or makes
a new one.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aheadgrad import pipeline
from aheadgrad.capture.lift import Lift
from aheadgrad.capture.origins import is_users
from aheadgrad.capture.rehearse import rehearse
from aheadgrad.capture.stage import Captured
from aheadgrad.errors import AheadgradError, FallbackError, FallbackWarning, NeedsNumbers, RecompileWarning
from aheadgrad.frontends import misses
from aheadgrad.frontends import module as modules
from aheadgrad.frontends.changes import take_changes, take_traced
from aheadgrad.frontends.function import Flat, flatten, make_call, parameter_names, takes_any_keyword
from aheadgrad.frontends.guarded_values import ValueWriter
from aheadgrad.frontends.guards import MISS, GuardWriter
from aheadgrad.frontends.misses import Miss
from aheadgrad.frontends.places import Given, changed_containers, containers
from aheadgrad.frontends.reach import Reach
from aheadgrad.frontends.returns import leave, return_text
from aheadgrad.frontends.shapes import Shapes
from aheadgrad.options import Options
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.stage import Entry
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


@dataclass(eq=False)
class Guarded:
    """An entry with its check; `why` tells what the check has against a call."""

    check: Callable[..., Any]
    call: Callable[..., Any]
    why: Callable[..., None]
    run: Callable[..., Any]
    entry: Entry
    source: str


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in self.calls:
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return self.miss(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

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
        if _inside_another_trace(pytree.tree_leaves((args, kwargs))):
            return self._fn(*args, **kwargs)
        if default_devices() is None:
            reason = "a TorchFunctionMode around the call wants to see each function"
            return self._run_uncompiled(reason, args, kwargs)
        if self._full:
            if misses.someone_listens():
                self._explain_miss(args, kwargs)
            return self._run_uncompiled(_FULL, args, kwargs)
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
                return self._run_uncompiled(error.reason, args, kwargs, error)
            if guarded.check(args, kwargs) is None:
                reason = "a property of the arguments cannot be checked"
                return self._run_uncompiled(reason, args, kwargs)
            self.entries.append(guarded)
            self.calls.append(guarded.call)
            if miss is not None:
                self.misses.append(miss)
        return guarded.call(args, kwargs)

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
        """A new entry; sizes that became symbols of our own accord are numbers again if that fails."""
        target = self._module.forward if self._module is not None else self._fn
        flat = flatten(args, kwargs, _names(target))
        symbols = self._shapes.symbols(flat)
        try:
            guarded = self._compile_flat(flat, args, kwargs, symbols)
        except Exception as error:
            asked_for = self.options.dynamic and not isinstance(error, NeedsNumbers)
            if symbols is None or asked_for:
                raise
            guarded = self._compile_flat(flat, args, kwargs, None)
        self._shapes.note(flat)
        return guarded

    def _compile_flat(
        self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols | None
    ) -> Guarded:
        target = self._module.forward if self._module is not None else self._fn
        places = modules.holders(self._module) if self._module is not None else []
        changed: list[Callable[[Any], None] | Given] = []
        given = [
            (path, v) for path, v in zip(flat.paths, flat.leaves, strict=True) if not isinstance(v, Tensor)
        ]
        _refuse_iterators(flat)
        reach = Reach(
            [("" if self._module else self._name, self._fn), *given], skip=[p.table for p in places]
        )

        _refuse_attributes(reach, [*zip(flat.paths, flat.leaves, strict=True)])
        _refuse_attributes(reach, [(p.slot.describe(), p.get()) for p in places])

        def around(see: Callable[[Any], Any]) -> Any:
            return modules.swapped(places, see) if places else nullcontext()

        def observed(*a: Any, **k: Any) -> Any:
            before = containers((a, k))
            result = self._fn(*a, **k)
            _check_result(result)
            new: list[tuple[Any, Any]]
            new = [(p.put, v) for p, v in modules.rebound(places) if id(v) not in originals]
            new += take_changes(reach, originals)
            new += changed_containers(before)
            changed[:] = [put for put, _ in new]  # arguments are left as they are until the end
            return result, [v for _, v in new]

        originals: dict[int, Tensor] = {}  # by the id of what the trace sees instead

        def around_noting(see: Callable[[Any], Any]) -> Any:
            for place in places:
                originals[id(see(place.get()))] = place.get()
            return around(see)

        state = [(p.slot, p.get()) for p in places]
        call = make_call(observed, flat, state, around_noting)
        call.watched = True
        call.returns = functools.partial(return_text, changed)
        if symbols is not None:
            call.symbols = symbols
        try:
            entry = pipeline.run(call, self.options)
        except AheadgradError:
            take_changes(reach, originals)
            raise
        except Exception:
            take_traced(reach, originals)
            raise
        take_changes(reach, originals)  # what a backward has left while it was recorded
        rehearse(entry.captured)
        values = ValueWriter(flat, args, kwargs, ordered=takes_any_keyword(target))
        guard = GuardWriter(values, entry, places, reach, leaves=bool(changed)).write()
        entry.captured.release()
        run = guard.call
        if any(isinstance(put, Given) for put in changed):
            run = functools.partial(leave, run)
        return Guarded(guard.check, run, guard.why, entry.run, entry, guard.source + "\n\n" + entry.source)


def _refuse_iterators(flat: Flat) -> None:
    """What an iterator gives next is nothing that a call could be checked for."""
    for path, value in zip(flat.paths, flat.leaves, strict=True):
        if hasattr(type(value), "__next__"):
            raise FallbackError(f"argument {path} is an iterator, which changes when it is used")


def _refuse_attributes(reach: Reach, given: list[tuple[str, Any]]) -> None:
    """While it is recorded a function sees other tensors than it was given, without their attributes."""
    for path, value in given:
        if type(value) in (Tensor, nn.Parameter) and not reach.names.isdisjoint(vars(value)):
            name = min(reach.names.intersection(vars(value)))
            raise FallbackError(f"{path} has an attribute {name} of its own, which the function may read")


def _check_result(result: Any) -> None:
    """Traced tensors must not leave inside objects that pytree does not know."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            continue
        held = getattr(leaf, "__dict__", None)
        inside = isinstance(held, dict) and any(isinstance(v, Tensor) for v in held.values())
        if inside or isinstance(leaf, types.GeneratorType):
            raise FallbackError(
                f"the function returns a {type(leaf).__name__}, which pytree does not know how to open"
            )


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

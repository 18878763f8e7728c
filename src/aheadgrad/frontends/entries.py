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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aheadgrad import pipeline
from aheadgrad.capture.origins import is_users
from aheadgrad.capture.rehearse import rehearse
from aheadgrad.capture.stage import Captured
from aheadgrad.errors import FallbackError, FallbackWarning, RecompileWarning
from aheadgrad.frontends import module as modules
from aheadgrad.frontends.function import flatten, make_call, parameter_names, takes_any_keyword
from aheadgrad.frontends.guards import MISS, GuardWriter
from aheadgrad.frontends.reach import Given, Reach, changed_containers, containers
from aheadgrad.options import Options
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.emit import Namespace
from aheadgrad.runtime.stage import Entry
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import dual_level, transform_level
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.trees import children


@dataclass(eq=False)
class Guarded:
    """An entry with its check."""

    check: Callable[..., Any]
    call: Callable[..., Any]
    run: Callable[..., Any]
    entry: Entry
    source: str


class Compiled:
    """What `aheadgrad.compile` returns for a function."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._module = fn if isinstance(fn, nn.Module) else None
        self.options = options
        self.entries: list[Guarded] = []
        self._calls: list[Callable[..., Any]] = []
        self.fallbacks: dict[str, int] = {}
        self._lock = threading.RLock()
        self._full = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in self._calls:
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return self._miss(args, kwargs)

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

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if _inside_another_trace(leaves):
            return self._fn(*args, **kwargs)
        if self._full:
            return self._run_uncompiled("the limit of entries is reached", args, kwargs)
        with self._lock:
            for guarded in self.entries:
                out = guarded.call(args, kwargs)
                if out is not MISS:
                    return out
            if len(self.entries) >= self.options.max_entries:
                return self._too_many(args, kwargs)
            try:
                guarded = self._compile(args, kwargs)
            except FallbackError as error:
                return self._run_uncompiled(error.reason, args, kwargs, error)
            inputs = guarded.check(args, kwargs)
            if inputs is None:
                reason = "a property of the arguments cannot be checked"
                return self._run_uncompiled(reason, args, kwargs)
            self.entries.append(guarded)
            self._calls.append(guarded.call)
        return guarded.call(args, kwargs)

    def _too_many(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._full = True
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        warnings.warn(
            f"{name} was compiled {len(self.entries)} times for different calls; further ones run "
            "uncompiled. Raise max_entries, or keep shapes and Python arguments the same.",
            RecompileWarning,
            stacklevel=_level_of_caller(),
        )
        return self._run_uncompiled("the limit of entries is reached", args, kwargs)

    def _run_uncompiled(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None
    ) -> Any:
        if self.options.fallback == "error":
            raise error or FallbackError(reason)
        if reason not in self.fallbacks:
            text = f"aheadgrad runs this call uncompiled: {reason}."
            warnings.warn(text, FallbackWarning, stacklevel=_level_of_caller())
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        return self._fn(*args, **kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guarded:
        target = self._module.forward if self._module is not None else self._fn
        flat = flatten(args, kwargs, _names(target))
        places = modules.holders(self._module) if self._module is not None else []
        changed: list[Callable[[Any], None] | Given] = []
        roots = [self._fn, *(v for v in flat.leaves if not isinstance(v, Tensor))]
        reach = Reach(roots, skip=[p.table for p in places])

        def around(see: Callable[[Any], Any]) -> Any:
            return modules.swapped(places, see) if places else nullcontext()

        def observed(*a: Any, **k: Any) -> Any:
            before = containers((a, k))
            result = self._fn(*a, **k)
            _check_result(result)
            new: list[tuple[Any, Any]]
            new = [(p.put, v) for p, v in modules.rebound(places) if id(v) not in originals]
            new += reach.take_changes(originals)
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
        call.returns = functools.partial(_return_text, changed)
        try:
            entry = pipeline.run(call, self.options)
        finally:
            reach.take_changes(originals)
        rehearse(entry.captured)
        writer = GuardWriter(flat, args, kwargs, entry.captured, places, reach, takes_any_keyword(target))
        check, run, source = writer.write(entry.run)
        entry.captured.release()
        if any(isinstance(put, Given) for put in changed):
            run = functools.partial(_leave, run)
        return Guarded(check, run, entry.run, entry, source + "\n\n" + entry.source)


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
    return any(isinstance(v, Tensor) and (isinstance(v, FakeTensor) or is_wrapped(v)) for v in leaves)


@dataclass(frozen=True, eq=False)
class Left:
    """A result, and what is still to be put into the caller's lists and dictionaries."""

    result: Any
    contents: list[tuple[Given, Any]]


def _leave(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = call(args, kwargs)
    if not isinstance(out, Left):
        return out
    for place, value in out.contents:
        place.put((args, kwargs), value)
    return out.result


def _return_text(
    changed: list[Callable[[Any], None] | Given], spec: Any, texts: list[str], names: Namespace
) -> str:
    """The flat outputs in the user's structure; what the run rebinds is bound again."""
    if not changed:
        return _structure_text(children(spec)[0], iter(texts), names)

    def finish(outs: list[Any]) -> Any:
        result, values = pytree.tree_unflatten(outs, spec)
        contents = []
        for put, value in zip(changed, values, strict=True):
            if isinstance(put, Given):
                contents.append((put, value))
            else:
                put(value)
        return Left(result, contents) if contents else result

    return f"{names.name(finish, 'finish')}([{', '.join(texts)}])"


def _structure_text(spec: Any, texts: Iterator[str], names: Namespace) -> str:
    if spec.is_leaf():
        return next(texts)
    if spec.type is tuple:
        return f"({''.join(f'{_structure_text(c, texts, names)}, ' for c in children(spec))})"
    if spec.type is list:
        return f"[{', '.join(_structure_text(c, texts, names) for c in children(spec))}]"
    if spec.type is dict:
        keys = [names.literal(key) for key in spec.context]
        parts = [_structure_text(c, texts, names) for c in children(spec)]
        return "{" + ", ".join(f"{k}: {p}" for k, p in zip(keys, parts, strict=True)) + "}"
    leaves = ", ".join(next(texts) for _ in range(spec.num_leaves))
    rebuild = functools.partial(pytree.tree_unflatten, treespec=spec)
    return f"{names.name(rebuild, 'rebuild')}([{leaves}])"


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

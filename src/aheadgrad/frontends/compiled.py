"""What `aheadgrad.compile` returns for a function, whichever front end: a callable that tells what it did.

fast.entries      what was compiled so far
fast.source       the generated code of all entries
fast.misses       why each entry after the first was made
fast.fallbacks    what ran uncompiled: reason, line, how often
fast.transforms   what was compiled for calls under transforms of torch.func
fast.breaks       where Dynamo split the function, and why
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch.compiler import is_dynamo_compiling

from aheadgrad.errors import FallbackError, FallbackWarning, RecompileWarning
from aheadgrad.frontends.misses import Miss, tell, what_keeps_changing
from aheadgrad.options import Options
from aheadgrad.recording.lift import Lift
from aheadgrad.report.memory import MemoryReport, memory_report
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.report.text import explain_entry, summary
from aheadgrad.torchlayer.dispatch import active_function_modes, dual_level, function_modes, transform_level

MISS = object()
FULL = "the limit of entries is reached"


class Lines(list[Any]):
    """A list that prints as one line for each element."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "none"


class Fallbacks(Counter[str]):
    """How often something ran uncompiled, by reason and line."""

    def __repr__(self) -> str:
        return "\n".join(f"{count} × {reason}" for reason, count in self.items()) or "none"


class CompiledFunction:
    """A function compiled by one of the front ends, which say how it is called."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self.options = options
        self.entries: Lines = Lines()
        self.misses: Lines = Lines()
        self.breaks: Lines = Lines()
        self.fallbacks = Fallbacks()
        self.calls: list[Callable[..., Any]] = []  # each gives MISS for what does not fit

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._fn(*args, **kwargs)
        for call in self.calls:
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return self.miss(args, kwargs)

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that none of `calls` takes."""
        raise NotImplementedError

    @cached_property
    def _transformed(self) -> Any:
        """What runs calls under transforms."""
        from aheadgrad.frontends.transformed import Transformed  # which compiles functions itself

        return Transformed(self)

    @property
    def transforms(self) -> Lines:
        """What was compiled for calls under transforms of `torch.func`."""
        made = vars(self).get("_transformed")
        return Lines([] if made is None else made.entries)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """As of the function itself: one with nothing to copy is shared. Entries are made anew."""
        fn = copy.deepcopy(self._fn, memo)
        return self if fn is self._fn else type(self)(fn, self.options)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By name where the name leads here, as functions; otherwise the function and the options."""
        name = str(getattr(self, "__qualname__", ""))
        found: Any = sys.modules.get(str(getattr(self, "__module__", "")))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (type(self), (self._fn, self.options))

    @property
    def name(self) -> str:
        return str(getattr(self._fn, "__name__", type(self._fn).__name__))

    @property
    def source(self) -> str:
        return "\n\n".join(f"# entry {i}\n{e.source}" for i, e in enumerate(self.entries))

    def explain(self) -> str:
        """What was captured and decided, entry by entry."""
        if not self.entries:
            return "Nothing is compiled yet: call the function first."
        return "\n\n".join(explain_entry(i, e.entry) for i, e in enumerate(self.entries))

    def memory(self) -> list[MemoryReport]:
        """What each entry saves for its backward, and why; what it computes again."""
        return [memory_report(e.entry.joint, e.entry.split) for e in self.entries]

    def note_miss(self, miss: Miss) -> None:
        """A call that no entry fits, or that the cache does not have: kept, and told to who listens."""
        self.misses.append(miss)
        tell(miss)

    def note_uncompiled(self, reason: str = FULL) -> None:
        """Before something runs uncompiled: counted, and said once; or an error, if that was asked for."""
        if self.options.fallback == "error":
            raise FallbackError(reason)
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] > 1:
            return
        kind: type[Warning] = FallbackWarning
        text = f"aheadgrad runs {self.name} uncompiled: {reason}."
        if reason == FULL:
            most, kind = self.options.max_entries, RecompileWarning
            text = (
                f"{self.name} was compiled {most} times for different calls; further ones run uncompiled. "
                f"What keeps changing: {what_keeps_changing(self.misses)}. Raise max_entries (now {most}), "
                "or keep shapes and Python arguments the same."
            )
        warnings.warn(text, kind, stacklevel=stacklevel_of_user())


class Described:
    """An entry that prints as one line; `call` runs it after a check, `source` is the code of both.

    `not_kept`: why it had to be made, though there is a cache.
    """

    not_kept = ""

    def __init__(self, entry: Any, call: Callable[..., Any], check: str, name: str = "") -> None:
        self.entry, self.call, self.name = entry, call, name
        self.source = f"{check}\n\n{entry.source}"

    def __repr__(self) -> str:
        return f"{self.name}: {summary(self.entry)}"


def is_transformed() -> bool:
    """Is a transform of `torch.func` active, or a level of forward-mode duals?"""
    return transform_level() is not None or dual_level() >= 0


def runs_the_original() -> bool:
    """Inside a recording, which wants to see the function's own ops."""
    modes = active_function_modes() if function_modes() else ()
    return any(isinstance(mode, Lift) or type(mode).__module__.startswith("torch.fx.") for mode in modes)

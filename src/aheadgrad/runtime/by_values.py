"""Backwards that look at values: recorded anew each time they run, with the values at hand.

Most derivatives take one way. A few of torch's formulas look at values when they are differentiated
themselves (`scatter_reduce` with products), and the user's own may (`if grad.max() > 1`). No program
can be kept for such a backward; but when it runs, the tensors that were saved and the tangents are there,
and what is read can be computed from them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aheadgrad.errors import DataDependentError, FallbackWarning, HigherOrderError, reason_of
from aheadgrad.recording.forward import explained
from aheadgrad.recording.origins import stacklevel_of_user
from aheadgrad.torchlayer.assumptions import Sizes, as_numbers, sizes_from

if TYPE_CHECKING:
    from aheadgrad.recording.orders import Level


def looks_at_values(error: Exception) -> bool:
    return isinstance(explained(error), DataDependentError)


def attempt(
    level: Level, shapes: list[Any], tangents: int, record: Callable[[], Any], make: Callable[[Any], Any]
) -> Any:
    """What `record` records; or, if that looks at values, a `ByValues` that makes it each time."""
    try:
        return record()
    except Exception as error:
        if not looks_at_values(error):
            raise
        return ByValues(level, shapes, tangents, make, error)


class ByValues:
    """`make` records; it is called each time. `shapes`: the traced values of what will be at hand, with
    the tangents last."""

    def __init__(
        self,
        level: Level,
        shapes: list[Any],
        tangents: int,
        make: Callable[[Sizes | None], Any],
        error: Exception,
    ) -> None:
        self.level = level
        self.shapes = shapes
        self.tangents = tangents
        self.make = make
        self.reason = reason_of(explained(error))
        if level.options.fallback == "error" or level.session.veiled:
            raise explained(error) from error
        self._warned = threading.Event()

    def find(self, at_hand: list[Any]) -> Any:
        """A recording for these very values."""
        if not self._warned.is_set():
            self._warned.set()
            text = f"aheadgrad records this backward each time it runs: {self.reason}."
            warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())
        session = self.level.session
        kept = len(self.shapes) - self.tangents
        pairs = list(zip(self.shapes[:kept], at_hand[:kept], strict=True))
        with session.lock, session.values.given(pairs, at_hand[kept:]):
            try:
                if session.mode.shape_env is None:
                    return self.make(None)
                sizes = sizes_from(zip(self.shapes, at_hand, strict=True))
                with as_numbers(session.mode, sizes):
                    return self.make(sizes)
            except Exception as error:
                if not looks_at_values(error):
                    raise
                raise HigherOrderError(
                    f"{self.reason}. What it looks at does not follow from the tensors that the call saved. "
                    "Differentiate the uncompiled function here."
                ) from error

    def __call__(self, args: list[Any]) -> list[Any]:
        """As a program of all that is at hand, which is forgotten when it has run."""
        session, cutter = self.level.session, self.level.cutter
        with session.lock:
            length = len(session.trace.records)
            try:
                program = self.find(args)
            finally:
                session.trace.rewind(length)
                cutter.named = min(cutter.named, length)
        out: list[Any] = program(args)
        return out

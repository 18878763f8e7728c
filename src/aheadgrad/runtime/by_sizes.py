"""Recordings that assume something new about symbolic sizes: one for each set of sizes that comes along.

The entry checks what its own recording assumed. A backward that is recorded later (a second derivative,
a new pattern of tangents) may have to know more: autograd turns a size into a number when it divides by
it, for instance. Such a backward is recorded again with numbers in place of the symbols, for the sizes
at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aheadgrad.errors import CaptureError
from aheadgrad.recording.orders import Level
from aheadgrad.runtime.backward import Failure
from aheadgrad.runtime.by_values import ByValues, attempt
from aheadgrad.torchlayer.assumptions import Sizes, as_numbers, assumptions, on_trial, sizes_from

_MOST = 64  # sets of sizes that are remembered


def record(level: Level, shapes: list[Any], tangents: int, make: Callable[[Sizes | None], Any]) -> Any:
    """What `make` records, for any sizes if possible; else a `BySizes`, or for values a `ByValues`.

    `shapes`: the traced values of what will be at hand, numbers and tensors, with the tangents last.
    """
    mode = level.session.mode
    if mode.shape_env is None or level.fixed_sizes is not None:
        fixed = None if mode.shape_env is None else level.fixed_sizes

        def at_once() -> Any:
            return make(None) if fixed is None else _with_numbers(level, fixed, make)

        return attempt(level, shapes, tangents, at_once, make)
    with on_trial(mode) as assumes_more:
        try:
            made = make(None)
        except Exception as error:  # perhaps because of the symbols
            made = Failure(error)
        if not assumes_more() and not isinstance(made, Failure):
            return made
    if level.session.veiled:  # parts of subclasses will be at hand, not the wholes
        raise CaptureError(_DIFFERENT_WAYS) from (made.error if isinstance(made, Failure) else None)
    return BySizes(level, shapes, tangents, make)


class BySizes:
    """One recording per set of sizes, made when they first come along."""

    def __init__(
        self, level: Level, shapes: list[Any], tangents: int, make: Callable[[Sizes | None], Any]
    ) -> None:
        self.level = level
        self.shapes = shapes
        self.tangents = tangents
        self.make = make
        self.made: dict[frozenset[Any], Any] = {}

    def find(self, at_hand: list[Any]) -> Any:
        sizes = sizes_from(zip(self.shapes, at_hand, strict=True))
        key = frozenset(sizes.items())
        with self.level.session.lock:
            if key not in self.made:
                if len(self.made) >= _MOST:
                    self.made.pop(next(iter(self.made)))
                self.made[key] = self._make(sizes)
            made = self.made[key]
        return made.find(at_hand) if isinstance(made, ByValues) else made

    def _make(self, sizes: Sizes) -> Any:
        def at_once() -> Any:
            return _with_numbers(self.level, sizes, self.make)

        return attempt(self.level, self.shapes, self.tangents, at_once, self.make)

    def __call__(self, args: list[Any]) -> list[Any]:
        """As a program of all that is at hand."""
        out: list[Any] = self.find(args)(args)
        return out


def _with_numbers(level: Level, sizes: Sizes, make: Callable[[Sizes | None], Any]) -> Any:
    mode = level.session.mode
    with as_numbers(mode, sizes):
        before = assumptions(mode)
        made = make(sizes)
        if assumptions(mode) != before:
            raise CaptureError(_DIFFERENT_WAYS)
    return made


_DIFFERENT_WAYS = (
    "This backward takes different ways for different sizes, and not all of them are known when it runs. "
    "Compile with dynamic=False, or differentiate all outputs together."
)

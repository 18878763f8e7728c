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
from typing import Any

from aheadgrad.errors import FallbackWarning
from aheadgrad.report.origins import stacklevel_of_user


class ByValues:
    """`make` records, each time: it is given what is at hand."""

    def __init__(self, make: Callable[[list[Any]], Any], reason: str) -> None:
        self.make = make
        self.reason = reason
        self._warned = threading.Event()

    def find(self, at_hand: list[Any]) -> Any:
        """A recording for these very values."""
        if not self._warned.is_set():
            self._warned.set()
            text = f"aheadgrad records this backward each time it runs: {self.reason}."
            warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())
        return self.make(at_hand)

    def __call__(self, args: list[Any]) -> list[Any]:
        """As a program of all that is at hand, which is forgotten when it has run."""
        out: list[Any] = self.find(args)(args)
        return out

"""A backward that gives nothing but what it hands over need not run before that is wanted.

It waits, with its arguments, for the backward that it hands over to; the two run as one program
(`program/joined`), and what is handed over is not written down in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from aheadgrad.backends.contract import Boxed
from aheadgrad.program.program import Program
from aheadgrad.torchlayer.autograd import versions


class Postponed:
    """`saved` are those of its arguments that must not change while it waits. `into`: it became part of
    another one, which has its results at these places."""

    into: tuple[Postponed, dict[int, int]] | None = None
    results: list[Any] | None = None
    version = -1  # before it waits

    def __init__(self, program: Program, run: Boxed, args: list[Any], saved: Sequence[Tensor]) -> None:
        self.program, self.run, self.args, self.saved = program, run, args, saved

    def wait(self) -> None:
        self.version = versions(self.saved)

    def begin(self) -> list[Any]:
        """The arguments, for whoever runs it."""
        changed = self.version >= 0 and self.version != versions(self.saved)
        args, self.args, self.saved = self.args, [], ()
        if changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation while the backward ran: by a hook, or in another thread."
            )
        return args

    def settle(self) -> list[Any]:
        if self.results is None:
            self.results = self.run(self.begin())
        return self.results


class Later(NamedTuple):
    """One result of something postponed."""

    of: Postponed
    number: int

    def found(self) -> Later:
        """Where it is by now."""
        of, number = self
        while of.into is not None:
            of, places = of.into
            number = places[number]
        return Later(of, number)


def settled(value: Tensor | Later) -> Tensor:
    if type(value) is not Later:
        return value  # type: ignore[return-value]
    of, number = value.found()
    result: Tensor = of.settle()[number]
    return result

"""The lines of a check, and of its twin that says why a call does not fit.

Both are written at once, so that they cannot differ:

    check                                   why
    if not (a1 == 3):                       if not (a1 == 3):
        return None                             note('n', '3', lambda: a1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aheadgrad.runtime.emit import Namespace, Script, build

Note = Callable[..., None]


class Checks:
    """Two scripts side by side; `title` names the function, which returns `misses` if a test fails."""

    def __init__(self, title: str, names: Namespace, parameters: str, misses: str = "None") -> None:
        self.misses = misses
        self.names = names
        self.parameters = parameters
        self.fast = Script(title, names)
        self.slow = Script("why", names)

    def line(self, text: str) -> None:
        self.fast.line(text)
        self.slow.line(text)

    def unless(
        self,
        test: str,
        what: str,
        assumed: str,
        came: str = "None",
        *,
        last: bool = False,
        implied: bool = False,
    ) -> None:
        """The call fits only if the test holds.

        `last` where going on makes no sense if it does not; `implied` where another test of the check
        fails as well then, so that only its twin has to ask.
        """
        if not implied:
            with self.fast.block(f"if not ({test}):"):
                self.miss()
        with self.slow.block(f"if not ({test}):"):
            self.slow.line(f"note({what!r}, {assumed!r}, lambda: {came}{', last=True' if last else ''})")
            if last:
                self.slow.line("return None")

    def miss(self) -> None:
        """In the check alone: the call does not fit."""
        self.fast.line(f"return {self.misses}")

    def only_fast(self, text: str) -> None:
        self.fast.line(text)

    def only_slow(self, text: str) -> None:
        self.slow.line(text)

    def explained(self) -> Callable[..., None]:
        """The twin, built when it is first needed."""
        comma = ", " if self.parameters else ""
        source = self.slow.source(f"{self.parameters}{comma}note")
        values, made = self.names.values, list[Callable[..., None]]()

        def why(*args: Any) -> None:
            if not made:
                made.append(build(source, "why", values))
            made[0](*args)

        return why

"""Room for the frames of a long program.

Python keeps frames in chunks of 16 KiB. A call that does not fit into the rest of a chunk gets another one
from the operating system, and gives it back when it returns. The code that Inductor writes around hundreds of
kernels has as many local variables, so that its frame fills most of a chunk; where the rest is too small for
the call of a kernel, each kernel costs a chunk taken and given back, which can take longer than starting it.

Whether that happens depends on how deep the call is. It shows in the pages that the system provides; then
the frame is put into a chunk that is large enough, which costs one such chunk for each call of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[[list[Any]], Any]

LONG = 64  # ops; and pages, if each of so many calls takes a chunk
_OFTEN = 3  # times in a row: first calls take pages for other reasons
_WORDS = 1 << 15  # a chunk is the next power of two: there is nearly as much left for others

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # no system that counts them

    def _pages() -> int:
        return 0
else:

    def _pages() -> int:
        """That the system has provided to this thread."""
        return getrusage(RUSAGE_THREAD).ru_minflt


class WithRoom:
    """The same function; from a frame that takes a large chunk once that is seen to be better."""

    def __init__(self, run: Run) -> None:
        self.run, self.roomy, self.seen = run, in_large_chunk(run), 0

    def __call__(self, args: list[Any]) -> Any:
        if self.seen >= _OFTEN:
            return self.roomy(args)
        before = _pages()
        results = self.run(args)
        self.seen = self.seen + 1 if _pages() - before >= LONG else 0
        return results


def in_large_chunk(run: Run) -> Run:
    def call(args: list[Any]) -> Any:
        return run(args)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)  # which it does not touch
    return call

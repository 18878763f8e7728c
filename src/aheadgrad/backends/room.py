"""Room for the frames of a long program.

Python keeps frames in chunks of 16 KiB. A call that does not fit into the rest of a chunk gets another one
from the operating system, and gives it back when it returns. The code that Inductor writes around hundreds of
kernels has as many local variables, so that its frame fills most of a chunk; where the rest is too small for
the call of a kernel, each kernel costs a chunk taken and given back, which can take longer than starting it.
Whether that happens depends on how deep the call is. So the frame is put into a chunk that is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WORDS = 1 << 15  # a chunk is the next power of two: there is nearly as much left for others
LONG = 64  # ops


def with_room(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The same function, called from a frame that takes a large chunk. Its pages are not touched."""

    def call(args: list[Any]) -> Any:
        return run(args)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)
    return call

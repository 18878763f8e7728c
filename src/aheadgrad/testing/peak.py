"""How much memory a backward needs at most, on the CPU: every allocation counts, also in kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.autograd import profiler


def peak_of_backward(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] = Tensor.backward
) -> int:
    """Bytes at the worst moment of a backward: what the forward left behind, and what came and went since.

    What was there before the forward does not count.
    """
    left: list[Tensor] = []
    before = sum(_allocations(lambda: left.append(forward())))
    during = _allocations(lambda: backward(left.pop()))
    return before + max(accumulate(during, initial=0))


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes at the worst moment of a run, beyond what was there before."""
    return max(accumulate(_allocations(run), initial=0))


def _allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes taken (positive) and given back (negative), in order."""
    with _silent(), profiler.profile(profile_memory=True) as watched:
        run()
    found = [e for e in watched.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler tells the terminal whenever it starts and stops."""
    with open(os.devnull, "w") as nowhere:
        terminal = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)

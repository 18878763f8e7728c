"""A backward made for all tangents, given only some: zeros stand for the missing ones.

Only for partition functions of the caller's own, when what their forward keeps is not enough to
trace a missing tangent away. Gradients that eager leaves None are zeros then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aheadgrad.joint.level import Exit

Run = Callable[[list[Any]], list[Any]]


def padded(run: Run, outputs: list[Exit], expected: tuple[Any, ...], pattern: tuple[Any, ...]) -> Run:
    """`run` takes the saved values and all tangents, laid out as expected; the result, those present."""
    kinds = [(e.size, e.dtype, e.device) for e in outputs]
    present = sum(p is not None for p in pattern)

    def full(args: list[Any]) -> list[Any]:
        saved, given = args[: len(args) - present], iter(args[len(args) - present :])
        args.clear()
        for (size, dtype, device), stride, there in zip(kinds, expected, pattern, strict=True):
            room = torch.empty_strided(size, stride, dtype=dtype, device=device)
            saved.append(room.zero_() if there is None else room.copy_(next(given)))
        return run(saved)

    return full

"""What code is told that asks whether it is being exported (`torch.compiler.is_exporting()`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from aheadgrad.torchlayer.lock import must_be_held


@contextmanager
def told_of_export() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` and `is_exporting()` say so."""
    must_be_held()
    flags: Any = torch.compiler
    before = flags._is_compiling_flag, flags._is_exporting_flag
    flags._is_compiling_flag = flags._is_exporting_flag = True
    try:
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before


@contextmanager
def optimizers_untold() -> Iterator[None]:
    """Inside, steps of optimizers know of no export: they round in other ways when they are compiled."""
    flags: Any = torch.compiler
    before: list[tuple[bool, bool]] = []

    def start(*_: Any) -> None:
        before.append((flags._is_compiling_flag, flags._is_exporting_flag))
        flags._is_compiling_flag = flags._is_exporting_flag = False

    def end(*_: Any) -> None:
        flags._is_compiling_flag, flags._is_exporting_flag = before.pop()

    hooks = register_optimizer_step_pre_hook(start), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

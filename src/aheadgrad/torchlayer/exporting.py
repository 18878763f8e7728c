"""What code is told that asks whether it is being exported (`torch.compiler.is_exporting()`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aheadgrad.torchlayer.lock import must_be_held


@contextmanager
def told_of_export(*, told: bool) -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` and `is_exporting()` say so, or do not."""
    must_be_held()
    flags: Any = torch.compiler
    before = flags._is_compiling_flag, flags._is_exporting_flag
    flags._is_compiling_flag = flags._is_exporting_flag = told
    try:
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before

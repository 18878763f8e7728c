"""Python frames and Dynamo, which looks at every one that runs inside a function it compiles."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_frames = torch._C._dynamo.eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_hidden: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Lets a function, and all that it calls, run as it is wherever it is called from."""
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    _hidden.add(function)


def is_hidden(function: Any) -> bool:
    return callable(function) and function in _hidden

"""Which line of the user's code an op came from."""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType

import torch

from aheadgrad.capture.trace import Origin

_OWN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_TESTING = os.path.join(_OWN[0], "testing") + os.sep


def is_users(filename: str) -> bool:
    """Is this a file of the user's, rather than torch's or ours?"""
    if filename.startswith(_TESTING):
        return True
    return not filename.startswith(_OWN) and not filename.startswith("<frozen")


def current_origin() -> Origin | None:
    """The innermost frame of the user's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return Origin(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def raised_by_torch(error: BaseException) -> bool:
    """Did torch (or we) raise this, rather than the user's own code?"""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and not is_users(tb.tb_frame.f_code.co_filename)


def origin_of_error(error: BaseException) -> Origin | None:
    """The innermost user's line in a traceback."""
    found = None
    tb: TracebackType | None = error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if is_users(code.co_filename):
            found = Origin(code.co_filename, tb.tb_lineno, code.co_name)
        tb = tb.tb_next
    return found

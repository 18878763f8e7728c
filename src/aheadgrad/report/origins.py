"""Which line of the user's code an op came from."""

from __future__ import annotations

import dis
import os
import re
import sys
from collections.abc import Iterable
from types import FrameType, TracebackType

import torch
from torch import fx

from aheadgrad.program.values import Origin

_OWN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_RAISES = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap}
_LINE = re.compile(r'File "(.*)", line (\d+), in (.*)')
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


def first_origin(nodes: Iterable[fx.Node]) -> Origin | None:
    """Where a graph of Dynamo's begins: the innermost line behind the first of these nodes that has one."""
    for node in nodes:
        lines = _LINE.findall(node.meta.get("stack_trace") or "")
        if lines:
            file, line, function = lines[-1]
            return Origin(file, int(line), function)
    return None


def stacklevel_of_user() -> int:
    """The `stacklevel` for a warning from the function that asks, so that it names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def raised_by_torch(error: BaseException) -> bool:
    """Did torch (or we) raise this, rather than the user's own code?"""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and not is_users(tb.tb_frame.f_code.co_filename)


def raised_below_users_code(error: BaseException) -> bool:
    """Did torch (or another library) raise this when the user's code called it?"""
    tb, last, users = error.__traceback__, None, False
    while tb is not None:
        users = users or is_users(tb.tb_frame.f_code.co_filename)
        tb, last = tb.tb_next, tb
    if not users or last is None:
        return False
    raises = last.tb_frame.f_code.co_code[last.tb_lasti] in _RAISES
    return not (raises and is_users(last.tb_frame.f_code.co_filename))


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

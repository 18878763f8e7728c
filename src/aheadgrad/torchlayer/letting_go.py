"""Errors that leave us let go of what the frames that they ended hold."""

from __future__ import annotations

from contextlib import suppress
from traceback import walk_tb

from aheadgrad.errors import with_causes
from aheadgrad.torchlayer.dispatch import dispatch_restored

_OURS = ("aheadgrad", "torch")


def let_go_of_locals(error: BaseException) -> None:
    """Before an error leaves us: frames of ours and of torch's that it ended hold tensors no longer.

    Nor do they hold the error itself, which holds them. The user's own frames stay as they are. Some of
    torch's hold guards, which put back dispatch keys as they were when they were made: that is undone.
    """
    with dispatch_restored():
        for one in with_causes(error):
            for frame, _ in walk_tb(one.__traceback__):
                if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
                    with suppress(RuntimeError):  # it is running
                        frame.clear()

"""Errors that teach: what was asked, where, why it cannot be, and what to do instead.

One class per kind of mistake; `docs/errors.md` has a section for each.
"""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class AheadgradError(Exception):
    """Base of every error that aheadgrad raises on its own account.

    `has_run` tells whether the function had begun to run when a recording was refused; `once` if the next
    call of the kind may be another matter.
    """

    has_run = False
    once = False


class CaptureError(AheadgradError, RuntimeError):
    """The function did something that cannot be recorded."""


class DataDependentError(CaptureError):
    """Python code needed the value of a tensor while the function was being recorded."""


class UnsupportedInput(CaptureError, TypeError):
    """An argument is of a kind that cannot be compiled for."""


class NeedsNumbers(AheadgradError):
    """A capture with symbolic sizes cannot be exact; with plain numbers it can. Never seen by users."""


class FallbackError(AheadgradError, RuntimeError):
    """The call would have run uncompiled, and `fallback="error"` asked to be told.

    `reason` says why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"This call cannot be compiled: {self.reason}.\n"
            'To run such calls uncompiled (with a warning), use fallback="warn".'
        )


def reason_of(error: BaseException) -> str:
    """Why something runs uncompiled, in one line."""
    if isinstance(error, FallbackError):
        return error.reason
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(". ") if lines else "no reason is given"
    return text if isinstance(error, AheadgradError) and lines else f"{type(error).__name__}: {text}"


def with_causes(error: BaseException) -> list[BaseException]:
    """An error, and those that it came from."""
    found: list[BaseException] = []
    todo = [error]
    while todo:
        one = todo.pop()
        if not any(one is e for e in found):
            found.append(one)
            todo += [e for e in (one.__cause__, one.__context__) if e is not None]
    return found


def without_frames(error: _Error) -> _Error:
    """An error to be kept, or swallowed: frames hold tensors, and those of whoever called them."""
    for one in with_causes(error):
        one.__traceback__ = None
    return error


class FallbackWarning(UserWarning):
    """A call runs uncompiled; the message says why. Given once per reason."""


class RecompileWarning(UserWarning):
    """A compiled callable has reached its limit of entries; the message says what keeps changing."""


class CacheWarning(UserWarning):
    """Something in a cache directory cannot be used; the message says what is done instead."""


class InvalidProgram(AheadgradError, AssertionError):
    """A program broke one of its own rules: a bug in aheadgrad or in a custom partitioner."""


class InvalidOption(AheadgradError, ValueError):
    """An option has a value that means nothing; the message lists those that do."""


class ArtifactError(AheadgradError, ValueError):
    """A program cannot be written to a file, or a file is damaged, too new or none of ours."""


class HigherOrderError(AheadgradError, RuntimeError):
    """A derivative was asked for that this compiled call does not provide."""


class BackendFailed(AheadgradError, RuntimeError):
    """A backend of yours raised while it compiled a program; what it raised is the cause."""


MISTAKES = (InvalidProgram, InvalidOption, BackendFailed)
"""Raised even where calls that cannot be compiled run as they are."""


class BackendDiffers(AheadgradError, RuntimeError):
    """What a backend compiled gives other results than eager (`backend="checked"`)."""

"""Somebody at a terminal who waits for a long compile sees what is going on, if `rich` is installed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PATIENCE = 1.0  # seconds without a word


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows a text while something takes long; on a terminal only."""
    if not _is_at_a_terminal():
        yield
        return
    shown: list[Any] = []

    def show() -> None:
        with suppress(ImportError):
            from rich.console import Console  # takes its time, too

            shown.append(Console(stderr=True).status(text))
            shown[0].start()

    waiting = threading.Timer(_PATIENCE, show)
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()
        for status in shown:
            status.stop()


def _is_at_a_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False

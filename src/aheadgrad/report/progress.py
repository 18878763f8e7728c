"""Somebody at a terminal who waits for a long compile sees what is going on, if `rich` is installed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 1.0  # seconds without a word


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows a text while something takes long; on a terminal only."""
    try:
        shown = sys.stderr.isatty()
        from rich.console import Console
    except (ImportError, AttributeError, ValueError):
        shown = False
    if not shown:
        yield
        return
    status = Console(stderr=True).status(text)
    waiting = threading.Timer(_PATIENCE, status.start)
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()
        status.stop()

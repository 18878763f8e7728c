"""One recording at a time, in the whole process.

While something is recorded, functions of torch are patched, and a module's tensors are swapped for traced
ones. So whatever records (the first call, another pattern of tangents, a higher order, Dynamo's backend)
holds this lock, and patches act for the thread that holds it only.

Dynamo has a lock like this one, and calls us with it held; code that is recorded may call Dynamo. So
Dynamo's is always taken first. A thread that holds both waits for no other thread: what it runs meanwhile
is one function of the user's and backwards that autograd runs in the calling thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


class RecordingLock:
    """Reentrant. `with RECORDING: ...`"""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._others: list[Any] = []  # Dynamo's lock, once for each time that this one is held
        self._holder = 0

    def __enter__(self) -> None:
        other = None if self.is_held else _dynamos()  # who holds ours has no need of it, or has it
        while True:
            if other is not None:
                other.acquire()
            if self._lock.acquire(blocking=False):
                break
            if other is not None:  # nobody waits with Dynamo's: the holder may have begun before it was there
                other.release()
            with self._lock:
                other = _dynamos()
        self._others.append(other)
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        other = self._others.pop()
        if not self._others:
            self._holder = 0
        self._lock.release()
        if other is not None:
            other.release()

    @property
    def is_held(self) -> bool:
        """By this thread, that is."""
        return self._holder == threading.get_ident()


def _dynamos() -> Any:
    module = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(module, "compile_lock", None)


RECORDING = RecordingLock()


def must_be_held() -> None:
    """Before something of torch is patched."""
    assert RECORDING.is_held, "torch is patched only while the recording lock is held"


def here() -> Callable[[], bool]:
    """A question for patched functions: are they called by the thread that patched them?"""
    owner = threading.get_ident()
    return lambda: threading.get_ident() == owner

"""Garbage collection while many small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local


class _Here(local):
    paused = False  # by this thread


_here = _Here()
_FROM_THE_START = gc.get_freeze_count()  # by Python itself, since 3.12


@contextmanager
def no_collection() -> Iterator[None]:
    """Programs and graphs are many small objects, none of them garbage; looking through all there is takes
    longer than making them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _here.paused = True
    try:
        yield
    finally:
        _here.paused = False
        gc.enable()


@contextmanager
def garbage_of_its_own() -> Iterator[None]:
    """Around a whole compile: it looks for garbage once, at the end, among what it has made itself."""
    if not gc.isenabled() or gc.get_freeze_count() > _FROM_THE_START:  # somebody else has other plans
        yield
        return
    gc.freeze()
    try:
        with no_collection():
            yield
            gc.collect()
    finally:
        gc.unfreeze()


@contextmanager
def collection_again() -> Iterator[None]:
    """For a part of it that is not ours: who knows how long it takes, and what it leaves."""
    if not _here.paused:
        yield
        return
    _here.paused = False
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        _here.paused = True

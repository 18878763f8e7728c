"""Random state: captures must leave the generators as they found them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aheadgrad.torchlayer.lock import here, must_be_held

_own = threading.local()  # in this thread: how often a recorded function set the random state
_SETTERS = ("set_state", "manual_seed", "seed")


class _Noticing:
    """Stands for the default generator in torch's own functions (`manual_seed`, `set_rng_state`)."""

    def __init__(self, generator: torch.Generator, note: Callable[[str], None]) -> None:
        self._generator, self._note = generator, note

    def __getattr__(self, name: str) -> Any:
        if name in _SETTERS:
            self._note(name)
        return getattr(self._generator, name)


@contextmanager
def noticing_changes() -> Iterator[list[str]]:
    """Collects a note when this thread sets the random state (`fork_rng` does) in between."""
    must_be_held()
    notes: list[str] = []
    is_here = here()
    original = torch.random.default_generator

    def note(name: str) -> None:
        if is_here():
            notes.append(name)
            _own.count = _count() + 1

    torch.random.default_generator = _Noticing(original, note)  # type: ignore[assignment]
    try:
        yield notes
    finally:
        torch.random.default_generator = original


def _count() -> int:
    count: int = getattr(_own, "count", 0)
    return count


def _alone() -> bool:
    """Is nobody else there to draw random numbers meanwhile?"""
    return threading.active_count() == 1


def was_set(generator: torch.Generator, state: torch.Tensor, seed: int) -> bool:
    """Has the generator another state than before? With other threads around, it may also have advanced."""
    if torch.equal(state, generator.get_state()):
        return False
    return generator is not torch.default_generator or _alone() or generator.initial_seed() != seed


@contextmanager
def shielded() -> Iterator[None]:
    """Around a recording, in which nothing is drawn: undoes what the function itself set."""
    before, count = torch.get_rng_state(), _count()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if _alone() or _count() != count:
            torch.default_generator.set_state(before)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)


@contextmanager
def preserved(wanted: bool = True) -> Iterator[None]:
    """Around ops that draw for us, and not for the user."""
    if not wanted:
        yield
        return
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)  # nobody is to notice
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

"""Random state: captures must leave the generators as they found them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def noticing_changes() -> Iterator[list[str]]:
    """Collects a note when somebody sets the random state (`fork_rng` does) in between."""
    notes: list[str] = []
    original = torch.random.set_rng_state

    def set_rng_state(new_state: torch.Tensor) -> None:
        notes.append("set_rng_state")
        original(new_state)

    torch.random.set_rng_state = torch.set_rng_state = set_rng_state
    try:
        yield notes
    finally:
        torch.random.set_rng_state = torch.set_rng_state = original


@contextmanager
def preserved(wanted: bool = True) -> Iterator[None]:
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

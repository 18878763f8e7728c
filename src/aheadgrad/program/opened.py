"""Programs are made of plain tensors: slots and values of tensor subclasses are taken apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aheadgrad.program.slots import Slot, parts
from aheadgrad.torchlayer.subclasses import Bundle


def opened(values: Iterable[tuple[Slot, Any]]) -> list[tuple[Slot, Any]]:
    """The same values with tensor subclasses taken apart: what a program takes and returns."""
    found: list[tuple[Slot, Any]] = []
    for slot, value in values:
        if type(value) is Bundle:
            found += zip(parts(slot, len(value.parts)), value.parts, strict=True)
        else:
            found.append((slot, value))
    return found

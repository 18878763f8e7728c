"""Modules: parameters and buffers become inputs; the module itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aheadgrad.program.slots import Buffer, Parameter, Slot


@dataclass(frozen=True, eq=False)
class Holder:
    """One place in a module where a tensor lives."""

    table: dict[str, Any]
    name: str
    slot: Slot

    def get(self) -> Tensor:
        value: Tensor = self.table[self.name]
        return value


def holders(root: nn.Module) -> list[Holder]:
    """All parameters, then all buffers, in the order of `named_parameters`."""
    return holders_in(list(root.named_modules()))


def holders_in(modules: Sequence[tuple[str, nn.Module]]) -> list[Holder]:
    found = []
    for where, kind in (("_parameters", Parameter), ("_buffers", Buffer)):
        for path, module in modules:
            table = getattr(module, where)
            for name in (n for n, value in table.items() if value is not None):
                found.append(Holder(table, name, kind(f"{path}.{name}" if path else name)))
    return found


@contextmanager
def swapped(places: list[Holder], see: Callable[[Any], Any]) -> Iterator[None]:
    """The modules with their tensors replaced by what the trace sees."""
    originals = [place.get() for place in places]
    seen = [see(value) for value in originals]
    try:
        for place, value in zip(places, seen, strict=True):
            place.table[place.name] = value
        yield
    finally:
        for place, original in zip(places, originals, strict=True):
            place.table[place.name] = original

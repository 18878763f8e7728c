"""Where values are held: dictionaries of modules and of globals, and cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import nn

from aheadgrad.program.slots import Buffer, Parameter

ABSENT = object()


@dataclass(frozen=True, eq=False)
class Place:
    """A key of a dictionary, or a closure's cell; `slot` if it holds a parameter or buffer."""

    holder: Any
    key: Any
    path: str
    slot: Any = None

    def get(self) -> Any:
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return ABSENT
        return self.holder.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


def holders(modules: Sequence[tuple[str, nn.Module]]) -> list[Place]:
    """All parameters, then all buffers, in the order of `named_parameters`."""
    found = []
    for where, kind in (("_parameters", Parameter), ("_buffers", Buffer)):
        for path, module in modules:
            table = getattr(module, where)
            for name in (n for n, value in table.items() if value is not None):
                full = f"{path}.{name}" if path else name
                found.append(Place(table, name, full, kind(full)))
    return found


@contextmanager
def swapped(places: list[Place], see: Callable[[Any], Any]) -> Iterator[None]:
    """The modules with their tensors replaced by what the trace sees."""
    originals = [place.get() for place in places]
    seen = [see(value) for value in originals]
    try:
        for place, value in zip(places, seen, strict=True):
            place.put(value)
        yield
    finally:
        for place, original in zip(places, originals, strict=True):
            place.put(original)

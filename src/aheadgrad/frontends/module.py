"""Modules: parameters and buffers become inputs; the module itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.program.slots import Buffer, Parameter, Slot
from aheadgrad.torchlayer import functional


@dataclass(frozen=True, eq=False)
class Holder:
    """One place in a module where a tensor lives."""

    module: nn.Module
    where: str
    name: str
    slot: Slot

    @property
    def table(self) -> dict[str, Any]:
        table: dict[str, Any] = getattr(self.module, self.where)
        return table

    def put(self, value: Any) -> None:
        self.table[self.name] = value

    def get(self) -> Tensor:
        value: Tensor = self.table[self.name]
        return value


def holders(root: nn.Module) -> list[Holder]:
    """All parameters, then all buffers, in the order of `named_parameters`."""
    found = []
    for where, kind in (("_parameters", Parameter), ("_buffers", Buffer)):
        for prefix, module in root.named_modules():
            for name, value in getattr(module, where).items():
                if value is not None:
                    full = f"{prefix}.{name}" if prefix else name
                    found.append(Holder(module, where, name, kind(full)))
    return found


@contextmanager
def swapped(places: list[Holder], see: Callable[[Any], Any]) -> Iterator[None]:
    """The module with its tensors replaced by what the trace sees."""
    originals = [(place, place.get()) for place in places]
    attributes = {id(p.module): (p.module, dict(p.module.__dict__)) for p in places}
    try:
        for place, value in originals:
            place.table[place.name] = see(value)
        yield
    finally:
        for place, value in originals:
            place.table[place.name] = value
        for module, before in attributes.values():
            _drop_leaks(module, before)


def _drop_leaks(module: nn.Module, before: dict[str, Any]) -> None:
    """Attributes that the run bound to traced tensors go back to what they were."""
    for name, value in list(module.__dict__.items()):
        if isinstance(value, Tensor) and functional.is_wrapped(value):
            if name in before:
                module.__dict__[name] = before[name]
            else:
                del module.__dict__[name]


def rebound(places: list[Holder]) -> list[tuple[Holder, Tensor]]:
    """Buffers that the run rebound (`self.count = self.count + 1`) rather than changed in place."""
    changed = []
    for place in places:
        now = place.table.get(place.name)
        if isinstance(now, Tensor) and functional.is_wrapped(now):
            changed.append((place, now))
    return changed


def is_module(fn: Any) -> bool:
    return isinstance(fn, nn.Module) and not isinstance(fn, torch.jit.ScriptModule)

"""What goes from a forward to its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aheadgrad.joint.level import Gradients
from aheadgrad.program.program import Program
from aheadgrad.program.slots import RandomState, Saved, SavedSize, Slot
from aheadgrad.program.values import Port, Value


@dataclass(frozen=True, eq=False)
class SavedValue:
    """One value kept for the backward.

    `copied`: what is kept is a copy of an input, which the graph made before the input changed. `is_state`:
    the state of a generator before the op that is said to have made it, which the backward runs again.
    """

    value: Value
    name: str
    reason: str
    copied: bool = False
    is_state: bool = False

    @property
    def slot(self) -> Slot:
        return (RandomState if self.is_state else Saved)(self.name, self.reason)


@dataclass(frozen=True, eq=False)
class SavedSet:
    """Everything the forward keeps: tensors, and sizes as numbers."""

    tensors: tuple[SavedValue, ...] = ()
    sizes: tuple[tuple[str, Any], ...] = ()

    @property
    def outputs(self) -> list[tuple[Slot, Any]]:
        """As the forward returns it."""
        found: list[tuple[Slot, Any]] = [(s.slot, s.value) for s in self.tensors]
        return found + [(SavedSize(name), number) for name, number in self.sizes]

    @property
    def ports(self) -> list[Port]:
        """As the backward takes it: sizes come first, as backends expect."""
        found = [Port(SavedSize(name), number, name) for name, number in self.sizes]
        return found + [Port(s.slot, s.value, s.name) for s in self.tensors]

    @property
    def states(self) -> dict[int, Value]:
        """By the number of a random op: the state that it is run again with."""
        return {s.value.op: s.value for s in self.tensors if s.is_state and s.value.op is not None}

    @property
    def values(self) -> list[Any]:
        """The numbers and values in the order in which a backward takes them."""
        return [*(number for _, number in self.sizes), *(s.value for s in self.tensors)]


@dataclass(frozen=True, eq=False)
class Split:
    """The forward, one backward per component, and what goes between."""

    forward: Program
    backwards: tuple[Program | None, ...]
    saved: tuple[SavedSet, ...]
    all_saved: SavedSet
    gradients: tuple[Gradients | None, ...]

"""A program: typed inputs, ops, typed outputs. An FX graph is made of it at the doors (`doors`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from aheadgrad.program.names import Naming
from aheadgrad.program.slots import Signature, Slot
from aheadgrad.program.values import Op, Port


@dataclass(frozen=True, eq=False)
class Program:
    """`outputs` pairs each slot with a value, a number or a constant.

    `made` is the module of somebody else (a partition function's) that the program was read from.
    `unbatched`: it will never be given a batch of some tangents at once, and others as they are.
    """

    role: str
    inputs: tuple[Port, ...]
    ops: tuple[Op, ...]
    outputs: tuple[tuple[Slot, Any], ...]
    naming: Naming = field(default_factory=Naming, repr=False)
    parts_first: bool = False
    unbatched: bool = False
    made: fx.GraphModule | None = field(default=None, repr=False)

    @cached_property
    def signature(self) -> Signature:
        return Signature(tuple(p.slot for p in self.inputs), tuple(slot for slot, _ in self.outputs))

    @property
    def results(self) -> list[Any]:
        return [value for _, value in self.outputs]

    @cached_property
    def module(self) -> fx.GraphModule:
        """The program as an FX module, with fake tensors of its own."""
        from aheadgrad.program.doors import module_of

        return module_of(self)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def code(self) -> str:
        return str(self.module.code)

    def __str__(self) -> str:
        from aheadgrad.program.show import text

        return text(self)

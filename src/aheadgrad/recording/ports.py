"""What goes into and out of a program that is cut out of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.program.slots import Slot


@dataclass(frozen=True, eq=False)
class Port:
    """A placeholder: its meaning, the traced value it stands for, its name."""

    slot: Slot
    value: Any
    name: str


@dataclass(frozen=True, eq=False)
class FreshCopy:
    """Uses of an input go through a copy of it (`clone`) or an alias (`view`)."""

    value: Tensor
    target: Any
    name: str

    @property
    def args(self) -> tuple[Any, ...]:
        return (list(self.value.shape),) if self.target is torch.ops.aten.view.default else ()


@dataclass(frozen=True, eq=False)
class Write:
    """An input's update kept inside the graph: `target(value, new)` after all that reads the old value."""

    target: Any
    value: Tensor
    new: Tensor


@dataclass(frozen=True, eq=False)
class Written:
    """As an output: the input after the write that the graph makes."""

    value: Tensor

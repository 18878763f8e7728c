"""Entrances: how each input of the program looks from inside the trace.

The user's function sees `seen`, an ordinary tensor as far as it can tell: a leaf if the real one
is a leaf, with a history if the real one has one. Gradients are taken with respect to `leaf`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.facts.facts import Geometry
from aheadgrad.program.slots import Buffer, Parameter, Slot
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import NodeBase, version
from aheadgrad.torchlayer.dynamo import is_static
from aheadgrad.torchlayer.subclasses import Form


class Enter(NodeBase):
    """Gives a placeholder a history, so that in-place rules see a non-leaf as in eager."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, holder: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        return holder[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(eq=False)
class Entrance:
    slot: Slot
    real: Tensor
    value: Any
    leaf: Tensor
    seen: Tensor
    history: Any
    version: int
    storage: Any
    required_grad: bool
    form: Form | None = None  # of a tensor subclass
    parts: tuple[Any, ...] = ()
    no_view: bool = False  # did the function ask of it what views refuse?
    old_memory: Tensor | None = None  # an alias of the memory that it had at first, where it may have left it

    @property
    def is_leaf(self) -> bool:
        return self.history is None

    @property
    def is_static(self) -> bool:
        """Does it stay where it is from call to call?"""
        return is_static(self.real) or isinstance(self.slot, Parameter | Buffer)


@dataclass(eq=False)
class Member:
    """An input that enters as an alias of another one, because both share memory."""

    slot: Slot
    real: Tensor
    owner: Tensor
    seen: Tensor
    history: Any
    required_grad: bool
    is_root: bool
    geometry: Geometry
    version: int | None = None  # of a version counter that the owner does not share
    leaf: Tensor | None = None  # what gradients are taken of, for one with a history of its own


def make_entrance(
    slot: Slot, real: Tensor, fake: Any, wrapped: Tensor, wrapped_leaf: Tensor | None
) -> Entrance:
    """Lets an input in; `wrapped_leaf` is given for one that requires grad and has a history."""
    if wrapped_leaf is not None:
        leaf = wrapped_leaf.requires_grad_()
        with torch.enable_grad():
            seen = Enter.apply(leaf, [wrapped])
    else:
        seen = leaf = wrapped.requires_grad_() if real.requires_grad else wrapped
    if isinstance(real, torch.nn.Parameter):
        seen._is_param = True
    return Entrance(
        slot,
        real,
        fake,
        leaf,
        seen,
        seen.grad_fn,
        version(seen),
        functional.storage_key(seen),
        real.requires_grad,
    )

"""Sizes, strides and offsets survive writes, as in eager.

`x[0] = 1` leaves x's strides alone. Its functional form makes a fresh tensor whose strides and
offset may differ, and a later `view`, `reshape` or `as_strided` would then decide differently.
A write therefore notes what the tensor looked like; before the tensor is used again it gets
that look back: a view is taken again from its base, anything else is laid out again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from aheadgrad.facts.facts import Geometry
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import CreationMeta, base_of, creation_meta, size_in_history
from aheadgrad.torchlayer.memory import reach
from aheadgrad.torchlayer.subclasses import is_foreign
from aheadgrad.torchlayer.symbols import typical


def geometry_of(t: Tensor) -> Geometry:
    return Geometry(tuple(t.size()), tuple(t.stride()), t.storage_offset())


def contiguous_strides(size: tuple[Any, ...]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for n in reversed(size):
        strides.append(step)
        step = step * (n if not isinstance(n, int) else max(n, 1))
    return tuple(reversed(strides))


def unseen_look(t: Tensor) -> Geometry | None:
    """The shape that gradients have to have, if the shape was changed where autograd did not look."""
    if t.grad_fn is None or is_foreign(t):
        return None
    size = tuple(size_in_history(t))
    if size == tuple(t.size()) or math.prod(size) != t.numel():
        return None
    more = t.dim() - len(size)
    summed = more > 0 and tuple(t.size())[more:] == size  # as autograd adds up what was added in front
    return Geometry(size, tuple(t.stride())[more:] if summed else contiguous_strides(size), 0)


def restore(t: Tensor, geometry: Geometry) -> None:
    functional.sync(t)
    if geometry_of(t).typical == geometry.typical:
        return
    base = base_of(t)
    with torch.no_grad():
        again = _from_base(t, base) if base is not None else None
        if again is None or geometry_of(again).typical != geometry.typical:
            if geometry.repeats:
                return
            again = _laid_out(functional.unwrap(t), geometry)
            functional.replace(t, again)
            functional.commit_update(t)
        else:
            functional.replace(t, again)
    functional.sync(t)


def _from_base(t: Tensor, base: Tensor) -> Tensor | None:
    """The view taken again from its base's present value."""
    functional.sync(base)
    old, new = functional.view_steps(base), functional.view_steps(t)
    if len(new) < len(old) or not all(map(functional.same_step, old, new)):
        return None
    with functional.below():
        return functional.replay_steps(functional.unwrap(base), new[len(old) :])


def _laid_out(held: Tensor, g: Geometry) -> Tensor:
    with functional.below():
        if typical(held.numel()) == 0:  # nothing to copy, but an offset is visible all the same
            room = torch.empty(g.offset, dtype=held.dtype, device=held.device)
            return torch.as_strided(room, g.size, g.stride, g.offset)
        if g.offset:
            length = reach(g.size, g.stride, g.offset)
            room = torch.empty(length, dtype=held.dtype, device=held.device)
            room = torch.as_strided_scatter(room, held, g.size, g.stride, g.offset)
            return torch.as_strided(room, g.size, g.stride, g.offset)
        room = torch.empty_strided(g.size, g.stride, dtype=held.dtype, device=held.device)
        return torch.ops.aten.copy.default(room, held)


def flattest(t: Tensor) -> Tensor:
    """The tensor to take `as_strided` of: as it addresses the storage, the base will do.

    Functionalization can undo an `as_strided` only when it is the first view of its chain.
    """
    base = base_of(t)
    if base is None or base.dtype != t.dtype or functional.view_steps(base):
        return t
    if creation_meta(t) != CreationMeta.DEFAULT:
        return t
    return base

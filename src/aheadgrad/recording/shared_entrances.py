"""Inputs that share memory enter as aliases of one owner, and as views of their own bases.

An alias is taken with `as_strided` from the owner where that is the first view; anywhere else it is made
of views that functionalization can undo one by one (`narrow`, `view`, `permute`), through another
dtype if need be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.program.slots import SharedBase, Slot
from aheadgrad.recording.entrances import Enter, Member
from aheadgrad.recording.geometry import geometry_of
from aheadgrad.recording.overlaps import is_dense
from aheadgrad.torchlayer.autograd import CreationMeta, base_of, creation_meta, set_creation_meta, version
from aheadgrad.torchlayer.strides import order_of

if TYPE_CHECKING:
    from aheadgrad.recording.forward import SharedGroup
    from aheadgrad.recording.session import Session


def enter_shared(session: Session, group: SharedGroup, seen: dict[int, Tensor]) -> None:
    """One entrance for the owner; the others are aliases and views of it."""
    owner = group.roots[0]
    names = ", ".join(slot.describe() for slot in group.slots)
    owner_seen = session.enter(SharedBase(names), owner).seen
    roots = {id(owner): owner_seen}
    slots = {id(m): slot for m, slot in zip(group.members, group.slots, strict=True)}
    if group.made:
        session.made_owners[id(owner)] = group.roots[1]
    counters = {0: owner_seen}
    for root, counter in zip(group.roots[1:], group.counters[1:], strict=True):
        separate = counter not in counters
        if separate:
            counters[counter] = owner_seen.data
        alias = view_like(counters[counter], owner, root, first=counter == 0)
        member = _enter_root(session, root, alias.detach())
        member.slot, member.owner = slots.get(id(root), SharedBase(names)), owner
        member.version = version(member.seen) if separate else None
        roots[id(root)] = member.seen
        session.enter_as_member(member)
    for given in group.members:
        if id(given) in roots:
            seen[id(given)] = roots[id(given)]
            continue
        base = base_of(given)
        assert base is not None
        with torch.set_grad_enabled(creation_meta(given) != CreationMeta.NO_GRAD_MODE):
            view = view_like(roots[id(base)], base, given, first=base is owner)
        if creation_meta(given) != CreationMeta.DEFAULT:
            set_creation_meta(view, creation_meta(given))
        seen[id(given)] = view
        session.enter_as_member(_member(slots[id(given)], given, owner, view, is_root=False))


def whole_storage(t: Tensor) -> Tensor:
    """All of the memory that a tensor lies in, as one row."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def _enter_root(session: Session, root: Tensor, alias: Tensor) -> Member:
    """A tensor with a history of its own, or none, in the owner's memory."""
    leaf = alias
    if root.requires_grad and root.is_leaf:
        alias.requires_grad_()
    elif root.requires_grad:
        leaf = session.wrap(session.fake(root)).requires_grad_()
        with torch.enable_grad():
            alias = Enter.apply(leaf, [alias])
    member = _member(SharedBase(""), root, root, alias, is_root=True)
    member.leaf = leaf
    return member


def _member(slot: Slot, real: Tensor, owner: Tensor, seen: Tensor, *, is_root: bool) -> Member:
    return Member(slot, real, owner, seen, seen.grad_fn, real.requires_grad, is_root, geometry_of(real))


def view_like(source: Tensor, real_source: Tensor, t: Tensor, *, first: bool) -> Tensor:
    """A view of a traced tensor that lies in it as `t` lies in the real one.

    `first`: the traced tensor is no view of another one, so that `as_strided` can be undone.
    """
    same_dtype = real_source.dtype == t.dtype
    alike = (source.size(), source.stride()) == (t.size(), t.stride())
    if same_dtype and not first and alike and real_source.storage_offset() == t.storage_offset():
        alias: Tensor = torch.ops.aten.alias.default(source)
        return alias
    if not same_dtype or not first:
        made = _by_views(source, real_source, t)
        if made is not None and made.stride() == t.stride():
            return made
    if not same_dtype:
        raise FallbackError("inputs that share memory, and are changed, are of different dtypes and strides")
    return source.as_strided(t.size(), t.stride(), t.storage_offset())


def _by_views(source: Tensor, real: Tensor, t: Tensor) -> Tensor | None:
    """As `view_like`, made of views that each can be undone; None where there is no such way."""
    width, other = real.element_size(), t.element_size()
    start = int(t.storage_offset()) * other - int(real.storage_offset()) * width
    if not is_flat(real) or start < 0 or start % other or (real.numel() * width) % other:
        return None
    if t.is_conj() or t.is_neg() or real.is_conj() or real.is_neg():
        return None
    flat = source.permute(order_of(real.stride())).reshape(-1)
    if real.dtype != t.dtype:
        flat = flat.view(t.dtype)
    return _strided(flat, tuple(t.size()), tuple(t.stride()), start // other)


def is_flat(t: Tensor) -> bool:
    """Without gaps, in some order of its dimensions."""
    return t.numel() > 0 and is_dense(t)


def _strided(flat: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor | None:
    """`flat.as_strided(size, stride, offset)` by narrowing and splitting: dimensions from the outermost
    in memory inwards, each as many rows of one stride."""
    dims = [d for d in order_of(stride) if size[d] != 1]
    current, length = flat, flat.size(0)
    for k, d in enumerate(dims):
        rest = 1 + sum((size[e] - 1) * stride[e] for e in dims[k + 1 :])
        rows, step = size[d], stride[d]
        back = max(0, offset + rows * step - length)
        if step < 1 or rest + back > step or offset - back < 0:
            return None
        current = current.narrow(-1, offset - back, rows * step)
        current = current.view(*current.shape[:-1], rows, step)
        offset, length = back, step
    current = current.select(-1, offset)
    place = {d: k for k, d in enumerate(dims)}
    current = current.permute([place[d] for d in range(len(size)) if d in place])
    for d in range(len(size)):
        if d not in place:
            current = current.unsqueeze(d)
    return current

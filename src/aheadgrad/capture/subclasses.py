"""Tensor subclasses at the borders of a trace: entering, tangents, and what they hold at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.capture.entrances import Entrance, make_entrance
from aheadgrad.errors import FallbackError
from aheadgrad.program.slots import Slot
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import no_function_modes
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import Bundle, Form, build, can_be_traced, form_of, parts_of

if TYPE_CHECKING:
    from aheadgrad.capture.session import Session


def enter_subclass(session: Session, slot: Slot, real: Tensor, symbolic_name: str) -> Entrance:
    """An entrance for a subclass: its parts enter, and it is built again around them."""
    if not can_be_traced(real):
        raise FallbackError(f"{slot.describe()} is a {type(real).__name__}, which has inner tensors of its own kind")
    form = form_of(real)
    parts = parts_of(real)
    with no_function_modes():
        names = [f"{symbolic_name}{k}_" if symbolic_name else "" for k in range(len(parts))]
        fakes = [session.fake(part, name) for part, name in zip(parts, names, strict=True)]
        seen = around(session, form, fakes, parts)
        leaf = None
        if real.requires_grad and not real.is_leaf:
            leaf = around(session, form, [session.fake(f) for f in fakes], parts)
        value: Any = Bundle(form_of(seen), list(fakes))
        entrance = make_entrance(slot, real, value, seen, leaf)
    entrance.form = form
    return entrance


def around(session: Session, form: Form, fakes: list[FakeTensor], like: list[Tensor] | None = None) -> Tensor:
    """A traced subclass of this form that holds these values; no history, and requires no grad."""
    veils = [session.wrap(f) for f in fakes]
    for veil, part in zip(veils, like or (), strict=False):
        if part.requires_grad:
            veil.requires_grad_()
    with torch.no_grad():
        made = build(form, iter(veils))
    if made.grad_fn is not None:
        made = made.detach()
    if made.requires_grad:
        made.requires_grad_(False)
    return made


def tangent_like(session: Session, like: Tensor, pattern: Any) -> tuple[Any, Tensor]:
    """The value of a tangent (its layout, or its form if it is a subclass) and its traced tensor."""
    if not isinstance(pattern, Form):
        value = _room(session, tuple(like.size()), pattern, like.dtype, like.device)
        return value, session.wrap(value)
    fakes = [_room(session, p.size, p.stride, p.dtype, p.device) for p in pattern.plain]
    return Bundle(pattern, list(fakes)), around(session, pattern, fakes)


def expected_tangent(session: Session, like: Tensor) -> Any:
    """The form that we expect of a tangent: that of a new tensor like the output."""
    with torch.no_grad():
        return form_of(torch.empty_like(like))


def _room(session: Session, size: Any, stride: Any, dtype: Any, device: Any) -> FakeTensor:
    with functional.outside():
        room = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(session.mode, room, device)

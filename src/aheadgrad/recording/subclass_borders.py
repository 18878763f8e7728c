"""Tensor subclasses at the borders of a trace: entering, tangents, and what they hold at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.errors import CaptureError, FallbackError
from aheadgrad.program.slots import Slot
from aheadgrad.recording.entrances import Entrance, make_entrance
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import no_function_modes
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.strides import dense_strides, order_of
from aheadgrad.torchlayer.subclasses import (
    Bundle,
    Fixed,
    Form,
    build,
    can_be_traced,
    form_of,
    inside,
    parts_of,
)
from aheadgrad.torchlayer.symbols import is_symbolic

if TYPE_CHECKING:
    from aheadgrad.recording.session import Session


def enter_subclass(session: Session, slot: Slot, real: Tensor) -> Entrance:
    """An entrance for a subclass: its parts enter, and it is built again around them."""
    with functional.outside():
        if not can_be_traced(real):
            raise FallbackError(f"{slot.describe()} is a {type(real).__name__} that cannot be taken apart")
        form = form_of(real)
        parts = parts_of(real)
    with no_function_modes():
        for part in parts:
            _enter_part(session, part)
        veils, fakes = zip(*(session.parts[id(part)][1:] for part in parts), strict=True)
        if id(real) in session.fakes:
            with functional.outside():
                form = form_of(session.fakes[id(real)])
        seen = around(form, list(veils))
        leaf = None
        if real.requires_grad and not real.is_leaf:
            shared = _common_parts(seen, _new_like(seen))
            leaf = around(
                form,
                [shared[k] if k in shared else session.wrap(session.fake(f)) for k, f in enumerate(fakes)],
            )
        value = Bundle(form, list(fakes))
        entrance = make_entrance(slot, real, value, seen, leaf)
        for (_, inner), (_, seen_inner) in zip(inside(real, ""), inside(entrance.seen, ""), strict=True):
            if seen_inner.is_leaf:
                seen_inner.requires_grad_(inner.requires_grad)
    value.form = form_of(entrance.seen)
    entrance.form = form
    entrance.parts = tuple(veils)
    return entrance


def _enter_part(session: Session, part: Tensor) -> None:
    """A part of several subclasses enters once."""
    if id(part) not in session.parts:
        fake = session.fake(part)
        veil = session.wrap(fake)
        if part.requires_grad:
            veil.requires_grad_()
        session.parts[id(part)] = (part, veil, fake)


def around(form: Form, veils: list[Tensor]) -> Tensor:
    """A traced subclass of this form around these parts; no history, and requires no grad."""
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
    shared = session.shared_parts.get(id(like), {})
    veils = []
    for k, p in enumerate(pattern.plain):
        room = _room(session, p.size, p.stride, p.dtype, p.device)
        veils.append(shared[k] if k in shared else session.wrap(room))
    for veil in shared.values():
        functional.sync(veil)
    return Bundle(pattern, [functional.unwrap(v) for v in veils]), around(pattern, veils)


def expected_tangent(session: Session, like: Tensor) -> Any:
    """The form that we expect of a tangent: that of a new tensor like the output.

    Parts that such a tensor has in common with the output (the offsets of a jagged one) are what
    makes both of one shape: any tangent has them in common with its output.
    """
    new = _new_like(like)
    session.shared_parts[id(like)] = _common_parts(like, new)
    return form_of(new)


def _new_like(t: Tensor) -> Tensor:
    """A new tensor of the same kind, as far as the subclass knows how to make one."""
    with torch.no_grad():
        try:
            return torch.empty_like(t)
        except (NotImplementedError, TypeError):
            return t.detach()


def _common_parts(a: Tensor, b: Tensor) -> dict[int, Tensor]:
    return {k: x for k, (x, y) in enumerate(zip(parts_of(a), parts_of(b), strict=False)) if x is y}


def _room(session: Session, size: Any, stride: Any, dtype: Any, device: Any) -> FakeTensor:
    with functional.outside():
        room = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(session.mode, room, device)


def with_sizes(form: Form, size: tuple[Any, ...]) -> Form:
    """A form with symbolic sizes, where all that it consists of has those of the whole."""
    if not any(map(is_symbolic, size)):
        return form
    inner: list[Any] = []
    for part in form.inner:
        if isinstance(part, Fixed) or tuple(part.size) != tuple(form.size) or not _is_dense(part):
            raise CaptureError(
                f"A tangent is a {form.kind.__name__}, where another kind of tensor was expected, and is not "
                "laid out as its parts are. Compile with dynamic=False for such tangents."
            )
        strides = dense_strides(size, order_of(part.stride))
        inner.append(
            with_sizes(part, size) if isinstance(part, Form) else replace(part, size=size, stride=strides)
        )
    return replace(form, inner=tuple(inner), size=size, stride=dense_strides(size, order_of(form.stride)))


def _is_dense(part: Any) -> bool:
    return bool(tuple(part.stride) == dense_strides(tuple(part.size), order_of(part.stride)))

"""Tangents brought into the layout that a backward was recorded with."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.contract import Executable
from aheadgrad.joint.requests import Unusual
from aheadgrad.runtime.backward import Backward, Make, Tangents
from aheadgrad.torchlayer.autocast import autocast_state
from aheadgrad.torchlayer.autograd import version
from aheadgrad.torchlayer.strides import dense_strides, order_of
from aheadgrad.torchlayer.subclasses import Form, build, form_of, is_foreign, parts_of, same_meta
from aheadgrad.torchlayer.wanted import Wanted

Kind = Unusual | bool
"""Of a tangent: missing (False), as expected (True), or unusual."""


class LaidOutBackward(Backward):
    """One program per set of present tangents, which are given the layout it was recorded with.

    For symbolic sizes, where strides tell little, and for the drop-in, whose compilers expect one
    backward. `expected` has, for each tangent, its dimensions from the outermost in memory inwards, or the
    form of the subclass that is expected. A program of plain tensors (`plainly`) serves subclasses of any
    form, which only have to be laid out for it.
    """

    def __init__(
        self,
        orders: tuple[Any, ...],
        usual: Executable | None,
        make: Make,
        *,
        fixed_autocast: bool,
        plainly: bool,
    ) -> None:
        super().__init__(orders, usual, make, fixed_autocast=fixed_autocast)
        self.plainly = plainly

    @property
    def usual_pattern(self) -> tuple[Any, ...]:
        return (True,) * len(self.expected)

    def run(self, node: Any, saved: list[Any], tangents: list[Tensor | None], wanted: Wanted) -> list[Any]:
        kinds, given = self.arranged(tangents)
        state = None if self.fixed_autocast else autocast_state()
        program = self.find(kinds, state, wanted)
        both = zip(tangents, given, strict=True)
        copies = [
            (t, copy, version(copy))
            for t, copy in both
            if t is not None and copy is not None and copy is not t
        ]
        saved += [t for t in given if t is not None]
        del given, both
        tangents.clear()
        grads = self.use(node, program, saved, state)
        for t, copy, before in copies:
            if version(copy) != before:  # a custom backward changes the gradient that it is given
                t.copy_(copy)
        return grads

    def arranged(self, tangents: Tangents, known: Any = ()) -> tuple[tuple[Kind, ...], Tangents]:
        kinds = tuple(map(self._kind, tangents, self.expected))
        return kinds, tuple(map(_as_recorded, tangents, kinds, self.expected))

    def _kind(self, t: Tensor | None, expected: Any) -> Kind:
        if t is None:
            return False
        if not is_foreign(t):
            return Unusual(None, order_of(t.stride())) if isinstance(expected, Form) else True
        form = form_of(t)
        if isinstance(expected, Form):
            return True if _same_kind(form, expected) else Unusual(form, ())
        return Unusual(None if self.plainly else form, expected if self.plainly else ())


def _same_kind(a: Form, b: Form) -> bool:
    """The same but for sizes."""
    if a.kind is not b.kind or a.names != b.names or not same_meta(a.meta, b.meta):
        return False
    pairs = [(x, y) for x, y in zip(a.inner, b.inner, strict=True) if isinstance(x, Form)]
    return all(isinstance(y, Form) and _same_kind(x, y) for x, y in pairs)


def _as_recorded(t: Tensor | None, kind: Kind, expected: Any) -> Tensor | None:
    if t is None:
        return None
    if isinstance(kind, Unusual):
        return t if kind.form is not None else _laid_out(t, kind.order)
    return _parts_laid_out(t, expected) if isinstance(expected, Form) else _laid_out(t, expected)


def _parts_laid_out(t: Tensor, expected: Form) -> Tensor:
    """A tangent that is a subclass of the expected kind, with parts laid out as expected."""
    parts = parts_of(t)
    made = [_laid_out(p, order_of(e.stride)) for p, e in zip(parts, expected.plain, strict=True)]
    if all(map(operator.is_, parts, made)):
        return t
    return _laid_out(t, order_of(expected.stride)) if t.requires_grad else build(form_of(t), iter(made))


def _laid_out(t: Tensor, order: Any) -> Tensor:
    strides = dense_strides(tuple(t.size()), order)
    if t.stride() == strides:
        return t
    if is_foreign(t):  # in words that a subclass understands
        back = sorted(range(len(order)), key=order.__getitem__)
        return t.permute(order).contiguous().permute(back)
    return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)

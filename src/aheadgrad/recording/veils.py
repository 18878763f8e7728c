"""Recording functions of tensor subclasses: autograd on the outside, functional ops on the inside.

In such a trace every plain tensor wears a veil. An op then comes to the recorder in one of three ways:

    on a subclass       its `__torch_dispatch__` is asked; the ops that it makes of it come here again
    on veils            done on the functional wrappers behind them, which brings it here once more
    on fake tensors     written down

So autograd's history belongs to the subclass, as in eager, and the program is made of plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import AheadgradError, FallbackError
from aheadgrad.facts.facts import Step
from aheadgrad.recording.geometry import geometry_of, restore
from aheadgrad.recording.ledger import ViewCall
from aheadgrad.recording.overlaps import check_memory
from aheadgrad.recording.recorder import Recorder
from aheadgrad.recording.told_by_name import STORAGE_OPS
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import (
    HigherOrderOperator,
    OpOverload,
    is_composite,
    is_mutable,
    is_view_op,
)
from aheadgrad.torchlayer.evalframe import hide_from_dynamo
from aheadgrad.torchlayer.fake import FakeTensor, is_fake_mode_on
from aheadgrad.torchlayer.subclasses import Veil, is_foreign, parts_of, reshape_outside

aten = torch.ops.aten
_LIFT_FRESH = aten.lift_fresh.default


class NeedsVeils(AheadgradError):
    """A subclass appeared in a trace that was begun for plain tensors."""


class VeiledRecorder(Recorder):
    """The recorder of traces with subclasses."""

    inside = False  # below functionalization
    asking = 0  # inside subclasses' own code
    declines = False  # the next op is for others

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.declines:
            self.declines = False
            return NotImplemented
        if self.asking and is_fake_mode_on():  # the subclass asks what a result would look like
            return func(*args, **kwargs)
        if self.inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if any(type(t) is FakeTensor for t in tensors):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _LIFT_FRESH:
            return self._functional(func, args, kwargs, [])
        if isinstance(func, HigherOrderOperator):
            raise FallbackError(f"{func} is used together with tensor subclasses")
        if any(map(_is_real, tensors)):
            args, kwargs = pytree.tree_map(self._enter, (args, kwargs))
            tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if any(map(is_foreign, tensors)):
            return self._ask(func, args, kwargs)
        if isinstance(func, OpOverload) and is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return self._functional(func, args, kwargs, tensors)

    def _enter(self, value: Any) -> Any:
        return self.adopt(value) if isinstance(value, Tensor) and _is_real(value) else value

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The subclass decides what the op means: called again, and declined by this recorder, the op
        goes to whom torch would ask next."""
        self.asking += 1
        self.declines = True
        try:
            with self, functional.below_autograd():
                out = func(*args, **kwargs)
        finally:
            self.asking -= 1
            self.declines = False
        if is_view_op(func):
            several = isinstance(out, list | tuple)
            for k, part in enumerate(out if several else (out,)):
                if isinstance(part, Tensor) and is_foreign(part):
                    at = k if several else None
                    step = Step(func, args[1:], tuple(kwargs.items()), at)
                    self.ledger.of(part).view = ViewCall(args[0], step, geometry_of(args[0]))
        return out

    def _functional(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if getattr(func, "overloadpacket", None) is not None:
            name = func.overloadpacket.__name__
            if name in STORAGE_OPS:
                raise FallbackError(f"{name} changes a storage in a function with tensor subclasses")
        veils: dict[int, Veil] = {}
        if self.asking and not is_view_op(func) and any(t.is_conj() or t.is_neg() for t in tensors):
            raise FallbackError("a subclass computes with a lazily conjugated tensor, which it does not see")
        reshapes = is_mutable(func) and torch.Tag.inplace_view in func.tags
        if self.asking and is_mutable(func) and tensors and not reshapes:
            check_memory(func.overloadpacket.__name__, tensors[0], tensors[1:])
        with self:
            for t in tensors:
                assert type(t) is Veil
                self.settle(t)
                veils[id(t.elem)] = t
        bare_args, bare_kwargs = pytree.tree_map(_lifted, (args, kwargs))
        self.inside = True
        try:
            with self, functional.behind_veils():
                out = func(*bare_args, **bare_kwargs)
        finally:
            self.inside = False
        if reshapes:
            for veil in veils.values():
                functional.sync(veil)
                g = geometry_of(veil.elem)
                if g != geometry_of(veil):
                    reshape_outside(veil, g.size, g.stride, g.offset)

        def veiled(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            known = veils.get(id(value))
            return Veil(value) if known is None else known

        return pytree.tree_map(veiled, out)

    def settle(self, t: Tensor) -> None:
        """Gives a tensor the strides that it has in eager, which a recorded write may have lost."""
        for part in parts_of(t):
            if type(part) is Veil:
                functional.sync(part)
                if geometry_of(part.elem) != geometry_of(part):
                    restore_behind(self, part)


hide_from_dynamo(VeiledRecorder.__torch_dispatch__)


def restore_behind(recorder: VeiledRecorder, veil: Veil) -> None:
    before = recorder.inside
    recorder.inside = True
    try:
        restore(veil.elem, geometry_of(veil))
    finally:
        recorder.inside = before


def _is_real(t: Tensor) -> bool:
    if is_foreign(t):
        return not functional.is_wrapped(t)
    return type(t) is not Veil


def _lifted(value: Any) -> Any:
    return value.elem if type(value) is Veil else value

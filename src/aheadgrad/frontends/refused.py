"""Calls that could not be compiled: what they looked like, so that nobody tries again at each call.

Trying means to run the user's Python while recording, and then again for real. A call that looks like one
that was refused runs uncompiled at once, which is never wrong, so the look is coarse: sizes and numbers,
which change from call to call, do not count; structure, kinds of tensors, strings, switches and modes do.
What is refused before the function has begun to run is not noted: there is no harm in trying again. After
as many refusals as there may be entries, nothing is tried any more.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.frontends.plain import is_array, is_too_large
from aheadgrad.torchlayer.autocast import autocast_state
from aheadgrad.torchlayer.autograd import is_view
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import keys_of

_CHOOSE = {str, bool, type(None), torch.dtype, torch.device}  # values that code chooses its way by


class Refused:
    """The refusals of one compiled callable, with the reason for each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._reasons: dict[Any, str] = {}

    def note(self, look: Any, reason: str) -> None:
        self._reasons[look] = reason

    def reason(self, look: Any) -> str | None:
        if not self._reasons:
            return None
        if len(self._reasons) >= self.most and look not in self._reasons:
            return "calls of other kinds were refused too often"
        return self._reasons.get(look)


def look_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], fn: Any) -> Any:
    """What a call looks like from afar; `leaves` are the flat arguments."""
    outside = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        repr(autocast_state()),
        fn.training if isinstance(fn, nn.Module) else None,
    )
    kinds = tuple(map(type, args)), tuple((key, type(v)) for key, v in kwargs.items())
    storages: dict[int, int] = {}
    return outside, kinds, tuple(_look(leaf, storages) for leaf in leaves)


def _look(value: Any, storages: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.device, value.dim(), *_behind(value, storages)
    if type(value) in _CHOOSE:
        return type(value), value
    if isinstance(value, enum.Enum):
        return type(value), value.name
    return type(value), is_array(value) and is_too_large(value)


def _behind(t: Tensor, storages: dict[int, int]) -> tuple[Any, ...]:
    """What autograd and memory have to do with a tensor."""
    shared = None
    if t.layout is torch.strided and type(t) in (Tensor, nn.Parameter, nn.Buffer):
        shared = storages.setdefault(storage_key(t), len(storages)), t.is_contiguous()
    return t.requires_grad, t.is_leaf, is_view(t), keys_of(t), shared

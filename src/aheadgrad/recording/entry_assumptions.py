"""What a recording assumed: of the surroundings of the call, and of single inputs.

Whoever keeps an entry checks it: each assumption is a function, and what it has to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from aheadgrad.recording.recording import Recording
from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.autocast import any_autocast, autocast_state
from aheadgrad.torchlayer.autograd import is_view, kind_of_view
from aheadgrad.torchlayer.dispatch import (
    default_devices,
    deterministic_mode,
    deterministic_warns,
    dual_level,
    function_modes,
    transform_level,
)
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.subclasses import parts_of

_requires_grad, _is_leaf = attrgetter("requires_grad"), attrgetter("is_leaf")


def assumed_around(captured: Recording, *, implied: bool) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """What has to hold around the call: what it is called, a function that tells, what it has to tell.

    Transforms, inference mode and autocast change which layers of torch a tensor passes through, and
    that is part of the check of any tensor (`implied`: there is one). Autocast does so for the tensors of
    its own device only.
    """
    yield "grad mode", torch.is_grad_enabled, captured.forward.grad_mode_before
    yield "forward-mode duals", dual_level, -1
    if not implied:
        yield "a torch.func transform", transform_level, None
        yield "inference mode", torch.is_inference_mode_enabled, torch.is_inference_mode_enabled()
    yield "the default dtype", torch.get_default_dtype, torch.get_default_dtype()
    if not function_modes():
        yield "the default device", function_modes, 0
    else:
        yield "the default device", default_devices, default_devices()
    if captured.autocast is not None:
        yield "autocast", autocast_state, captured.autocast
    elif torch.accelerator.is_available() or not implied:
        yield "autocast", any_autocast, False
    yield "deterministic algorithms", deterministic_mode, deterministic_mode()
    if deterministic_mode():
        yield "deterministic algorithms that warn", deterministic_warns, deterministic_warns()
    if captured.session.attends:
        yield "kernels for attention", attention_kernels, attention_kernels()


def assumed_of_inputs(
    captured: Recording, reals: Sequence[Tensor], given: Collection[int]
) -> Iterator[tuple[int, str, Callable[[Any], Any], Any]]:
    """By number of an input: what is assumed of it, besides what the check of tensors sees.

    `requires_grad` where grad mode is off, leaves (among `given`, ids of arguments) and views: only where it
    can make a difference.
    """
    session, facts = captured.session, captured.facts.inputs
    asks = session.asks_autograd
    ignored = not captured.forward.grad_mode_before  # then the check of tensors passes over it
    rewritten = {f.index for f in facts if not f.untouched}
    views = {f.index for f in facts if f.history_changed}
    no_views = {id(entrance.real) for entrance in session.entrances if entrance.no_view}
    for i, real in enumerate(reals):
        if ignored and (asks or session.ambient.grad_was_on):
            yield i, "requires_grad", _requires_grad, real.requires_grad
        if real.requires_grad and id(real) in given and (asks or i in rewritten):
            yield i, "is_leaf", _is_leaf, real.is_leaf
        if i in views:
            yield i, "kind_of_view", kind_of_view, kind_of_view(real)
        if id(real) in no_views:
            yield i, "is_view", is_view, False


class Memory:
    """What is assumed of memory: where inputs lie, and which of them share it."""

    def __init__(self, captured: Recording, reals: Sequence[Tensor]) -> None:
        facts = captured.facts.inputs
        self.changed = {
            f.index for f in facts if f.data_changed or f.storage_changed or f.geometry is not None
        }
        several = sum(len(parts_of(r)) for r in reals) > 1 and not isinstance(reals[0], FakeTensor)
        self.changes = bool(self.changed) and several
        self.offsets = captured.depends_on_offsets

    @property
    def matters(self) -> bool:
        return self.changes or self.offsets

    def pattern(self, tensors: Sequence[Tensor]) -> Any:
        """Which of these share storage, and where in it they lie."""
        if not self.matters:
            return None
        keys = list(map(storage_key, tensors)) if self.changes else []
        if len(set(keys)) < len(keys):
            return [(keys.index(k), int(t.storage_offset())) for t, k in zip(tensors, keys, strict=True)]
        return [int(t.storage_offset()) for t in tensors] if self.offsets else None

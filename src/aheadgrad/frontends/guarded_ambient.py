"""The part of a check about what is active around the call: modes, switches, defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from aheadgrad.capture.stage import Captured
from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.autocast import any_autocast, autocast_state
from aheadgrad.torchlayer.dispatch import (
    default_devices,
    deterministic_mode,
    deterministic_warns,
    dual_level,
    function_modes,
    transform_level,
)


def conditions_around(captured: Captured, *, implied: bool) -> Iterator[tuple[str, Callable[[], Any], Any]]:
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

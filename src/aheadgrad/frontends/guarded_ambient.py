"""The part of a check about what is active around the call: modes, switches, defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from aheadgrad.recording.recording import Recording
from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.autocast import any_autocast, autocast_state
from aheadgrad.torchlayer.dispatch import (
    default_devices,
    deterministic_mode,
    deterministic_warns,
    function_modes,
    transform_level,
)

if TYPE_CHECKING:
    from aheadgrad.frontends.guards import GuardWriter


def write_ambient(writer: GuardWriter, captured: Recording, *, implied: bool) -> None:
    """What has to hold around the call.

    Transforms, inference mode and autocast change which layers of torch a tensor passes through, and
    that is part of the check of any tensor (`implied`: there is one). Autocast does so for the tensors of
    its own device only.
    """
    name = writer.names.name

    def now(function: Callable[[], Any], value: Any, what: str, test: str = "{now} is {value}") -> None:
        text = f"{name(function, function.__name__)}()"
        writer.unless(test.format(now=text, value=writer.names.literal(value)), what, value, text)

    now(torch.is_grad_enabled, captured.forward.grad_mode_before, "grad mode")
    writer.unless(
        f"{name(forward_ad, 'forward_ad')}._current_level < 0", "forward-mode duals", "none", "'some'"
    )
    if not implied:
        now(transform_level, None, "a torch.func transform")
        now(torch.is_inference_mode_enabled, torch.is_inference_mode_enabled(), "inference mode")
    now(torch.get_default_dtype, torch.get_default_dtype(), "the default dtype")
    if default_devices() == ():
        now(function_modes, 0, "the default device", "not {now}")
    else:
        now(default_devices, default_devices(), "the default device", "{now} == {value}")
    if captured.autocast is not None:
        now(autocast_state, captured.autocast, "autocast", "{now} == {value}")
    elif torch.accelerator.is_available() or not implied:
        now(any_autocast, False, "autocast", "not {now}")
    now(deterministic_mode, deterministic_mode(), "deterministic algorithms")
    if deterministic_mode():
        now(deterministic_warns, deterministic_warns(), "deterministic algorithms that warn")
    if captured.session.attends:
        now(attention_kernels, attention_kernels(), "kernels for attention", "{now} == {value}")

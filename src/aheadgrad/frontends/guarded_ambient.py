"""The part of a check about what is active around the call: modes, switches, defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from aheadgrad.capture.stage import Captured
from aheadgrad.runtime.emit import Namespace
from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.autocast import any_autocast, autocast_state
from aheadgrad.torchlayer.dispatch import (
    default_devices,
    deterministic_mode,
    deterministic_warns,
    function_modes,
    transform_level,
)


def ambient_tests(names: Namespace, captured: Captured, *, implied: bool) -> list[str]:
    """What has to hold around the call.

    Transforms, inference mode and autocast change which layers of torch a tensor passes through, and
    that is part of the check of any tensor (`implied`: there is one). Autocast does so for the tensors of
    its own device only.
    """
    name = names.name
    tests = [f"{name(torch.is_grad_enabled, 'is_grad_enabled')}() is {captured.forward.grad_mode_before}"]
    tests.append(f"{name(forward_ad, 'forward_ad')}._current_level < 0")
    if not implied:
        tests.append(f"{name(transform_level, 'transform_level')}() is None")
        inference = name(torch.is_inference_mode_enabled, "is_inference")
        tests.append(f"{inference}() is {torch.is_inference_mode_enabled()}")
    dtype = names.literal(torch.get_default_dtype())
    tests.append(f"{name(torch.get_default_dtype, 'default_dtype')}() is {dtype}")
    devices = default_devices()
    if devices == ():
        tests.append(f"not {name(function_modes, 'function_modes')}()")
    else:
        tests.append(f"{name(default_devices, 'default_devices')}() == {name(devices, 'devices')}")
    if captured.autocast is not None:
        tests.append(f"{name(autocast_state, 'autocast_state')}() == {name(captured.autocast, 'autocast')}")
    elif torch.accelerator.is_available() or not implied:
        tests.append(f"not {name(any_autocast, 'any_autocast')}()")
    deterministic = deterministic_mode()
    tests.append(f"{name(deterministic_mode, 'deterministic')}() is {deterministic}")
    if deterministic:
        tests.append(f"{name(deterministic_warns, 'warns_only')}() is {deterministic_warns()}")
    if captured.session.attends:
        now = f"{name(attention_kernels, 'attention_kernels')}()"
        tests.append(f"{now} == {attention_kernels()!r}")
    return tests


def surroundings_of_call() -> dict[str, Any]:
    """The same in words, to tell why a call does not fit."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": default_devices(),
        "autocast": str(autocast_state()),
        "deterministic algorithms": (deterministic_mode(), deterministic_warns()),
        "kernels for attention": attention_kernels(),
    }

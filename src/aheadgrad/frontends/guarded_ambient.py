"""The part of a check about what is active around the call: modes, switches, defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from aheadgrad.frontends.checks import Checks
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

if TYPE_CHECKING:
    from aheadgrad.capture.stage import Captured


def write_ambient(checks: Checks, names: Namespace, captured: Captured, *, implied: bool) -> None:
    """What is active around the call.

    Transforms, inference mode and autocast change which layers of torch a tensor passes through, and
    that is part of the check of any tensor (`implied`: there is one). Autocast does so for the tensors of
    its own device only.
    """
    name, unless = names.name, checks.unless
    grad = captured.forward.grad_mode_before
    mode = f"{name(torch.is_grad_enabled, 'is_grad_enabled')}()"
    unless(f"{mode} is {grad}", "grad mode", "on" if grad else "off", f"'on' if {mode} else 'off'")
    level = f"{name(transform_level, 'transform_level')}()"
    unless(f"{level} is None", "a torch.func transform", "none", level, last=True, implied=implied)
    dual = f"{name(forward_ad, 'forward_ad')}._current_level"
    unless(f"{dual} < 0", "forward-mode differentiation", "off", "'on'", last=True)
    inference = torch.is_inference_mode_enabled()
    now = f"{name(torch.is_inference_mode_enabled, 'is_inference')}()"
    unless(f"{now} is {inference}", "inference mode", str(inference), now, implied=implied)
    dtype = torch.get_default_dtype()
    now = f"{name(torch.get_default_dtype, 'default_dtype')}()"
    unless(f"{now} is {names.literal(dtype)}", "the default dtype", str(dtype), now)
    devices = default_devices()
    now = f"{name(default_devices, 'default_devices')}()"
    quick = f"not {name(function_modes, 'function_modes')}()"
    same = f"{now} == {name(devices, 'devices')}"
    unless(quick if devices == () else same, "the default device", str(devices or "not set"), now)
    state = captured.autocast
    now = f"{name(autocast_state, 'autocast_state')}()"
    if state is None:
        off = f"not {name(any_autocast, 'any_autocast')}()"
        one_device = not torch.accelerator.is_available()
        unless(off, "autocast", str(state), now, implied=implied and one_device)
    else:
        unless(f"{now} == {name(state, 'autocast')}", "autocast", str(state), now)
    deterministic = torch.are_deterministic_algorithms_enabled()
    test = f"{name(deterministic_mode, 'deterministic')}() is {deterministic}"
    if deterministic:
        test += f" and {name(deterministic_warns, 'warns_only')}() is {deterministic_warns()}"
    unless(test, "deterministic algorithms", str(deterministic), str(not deterministic))
    if captured.session.attends:
        kernels, now = attention_kernels(), f"{name(attention_kernels, 'attention_kernels')}()"
        unless(f"{now} == {kernels!r}", "kernels for attention", str(kernels), now)

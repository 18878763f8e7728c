"""A call as it can be recorded once more: what surrounded it, and tensors that look like its arguments."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from aheadgrad.recording.entrances import Enter
from aheadgrad.torchlayer.autocast import autocast_as, autocast_state
from aheadgrad.torchlayer.autograd import is_view
from aheadgrad.torchlayer.dispatch import default_devices
from aheadgrad.torchlayer.fake import FakeTensorMode, fake_like, new_mode


class Ambient:
    """What surrounds a call now, and can again."""

    def __init__(self) -> None:
        self.grad, self.autocast = torch.is_grad_enabled(), autocast_state()
        self.dtype, self.devices = torch.get_default_dtype(), default_devices()

    def active(self) -> ExitStack:
        stack, dtype = ExitStack(), torch.get_default_dtype()
        stack.enter_context(torch.set_grad_enabled(self.grad))
        stack.enter_context(autocast_as(self.autocast))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(self.dtype)
        if default_devices() != self.devices:
            for device in self.devices or ():
                stack.enter_context(torch.device(device))
        return stack


def without_memory(leaves: list[Any]) -> list[Any]:
    """Fake tensors in the place of tensors, which look alike to a recording."""
    mode = new_mode(dynamic=False)
    made = {id(v): _fake(mode, v) for v in leaves if isinstance(v, Tensor)}
    return [made.get(id(v), v) for v in leaves]


def _fake(mode: FakeTensorMode, t: Tensor) -> Tensor:
    fake: Tensor = fake_like(mode, t)
    with torch.enable_grad():
        if t.requires_grad and not t.is_leaf:
            leaf = fake_like(mode, t).requires_grad_()
            fake = Enter.apply(leaf, [fake])
        elif t.requires_grad:
            fake.requires_grad_()
        return fake.view_as(fake) if is_view(t) else fake

"""A call as it can be recorded once more: what surrounded it, and tensors that look like its arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.program.doors import type_of
from aheadgrad.program.values import TensorType
from aheadgrad.recording.entrances import Enter
from aheadgrad.torchlayer.autocast import autocast_as, autocast_state
from aheadgrad.torchlayer.autograd import is_view
from aheadgrad.torchlayer.dispatch import default_devices
from aheadgrad.torchlayer.dynamo import is_static, mark_static
from aheadgrad.torchlayer.fake import Fakes


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


@dataclass(frozen=True)
class Sketch:
    """What a recording sees of a plain tensor; to make one, nothing has to be loaded that fakes need."""

    type: TensorType
    requires_grad: bool
    is_leaf: bool
    is_view: bool
    is_static: bool

    @classmethod
    def of(cls, t: Tensor) -> Sketch:
        return cls(type_of(t), t.requires_grad, t.is_leaf, is_view(t), is_static(t))

    def drawn(self, fakes: Fakes) -> Tensor:
        """A fake tensor that looks like it."""
        fake: Tensor = fakes.tensor(self.type)
        with torch.enable_grad():
            if self.requires_grad and not self.is_leaf:
                fake = Enter.apply(fakes.tensor(self.type).requires_grad_(), [fake])
            elif self.requires_grad:
                fake.requires_grad_()
            if self.is_view:
                fake = fake.view_as(fake)
        if self.is_static:
            mark_static(fake)
        return fake


def sketches(leaves: list[Any]) -> Callable[[], list[Any]]:
    """The leaves again, with tensors that have no memory in the place of tensors."""
    drawn = {id(v): Sketch.of(v) for v in leaves if isinstance(v, Tensor)}
    keys = [(id(v), None) if isinstance(v, Tensor) else (0, v) for v in leaves]

    def make() -> list[Any]:
        fakes = Fakes(None, ())
        made = {key: sketch.drawn(fakes) for key, sketch in drawn.items()}
        return [made[key] if key else value for key, value in keys]

    return make

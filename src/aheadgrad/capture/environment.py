"""The surroundings of a capture: what must be set up, and put back, around any tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from aheadgrad.torchlayer import functional, random
from aheadgrad.torchlayer.autograd import saved_tensor_hooks_off, set_grad_enabled
from aheadgrad.torchlayer.fake import quiet_logs


@contextmanager
def tracing(*modes: object, veiled: bool = False) -> Iterator[None]:
    """Functionalization and the given modes on; random state, grad mode and hooks shielded.

    `veiled`: functionalization works behind veils only (see `veils`).
    """
    grad_mode = torch.is_grad_enabled()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # composite ops are taken apart by autograd's layer only
            stack.enter_context(torch.inference_mode(False))
            set_grad_enabled(False)
        stack.enter_context(random.preserved())
        stack.enter_context(saved_tensor_hooks_off())
        stack.enter_context(functional.enabled())
        if veiled:
            stack.enter_context(functional.not_here())
        stack.enter_context(quiet_logs())
        if torch.is_anomaly_enabled():  # it looks at values, of which there are none here
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for mode in modes:
            stack.enter_context(mode)  # type: ignore[arg-type]
        try:
            yield
        finally:
            set_grad_enabled(grad_mode)

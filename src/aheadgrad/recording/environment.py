"""The surroundings of a capture: what must be set up, and put back, around any tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from aheadgrad.errors import FallbackError
from aheadgrad.torchlayer import functional, random
from aheadgrad.torchlayer.autograd import plain_engine, saved_tensor_hooks_off, set_grad_enabled
from aheadgrad.torchlayer.dispatch import deterministic_mode, deterministic_warns
from aheadgrad.torchlayer.fake import quiet_logs
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.subclasses import no_trace_in_globals


class Ambient:
    """Global switches that recorded ops obey when they run: the function may not turn them by itself.

    They are watched while the function runs; a backward may be recorded later, under others.
    """

    def __init__(self) -> None:
        self.watched = False
        self.dtype = torch.get_default_dtype()
        self.deterministic = deterministic_mode(), deterministic_warns()
        self.inference = torch.is_inference_mode_enabled()
        self.grad_was_on = False  # was anything recorded with grad mode on?

    def check(self) -> None:
        if not self.watched:
            return
        self.grad_was_on = self.grad_was_on or torch.is_grad_enabled()
        if (deterministic_mode(), deterministic_warns()) != self.deterministic:
            on, warn_only = self.deterministic
            torch.use_deterministic_algorithms(on, warn_only=warn_only)
            raise FallbackError("deterministic algorithms are switched inside the function")
        if torch.is_inference_mode_enabled() and not self.inference:
            raise FallbackError("inference mode is entered inside the function")

    @property
    def other_dtype(self) -> bool:
        """Has the function set a default dtype of its own for now?"""
        return self.watched and torch.get_default_dtype() is not self.dtype

    def refuse_dtype(self) -> None:
        torch.set_default_dtype(self.dtype)  # the function is about to run again, from the start
        raise FallbackError("the default dtype is changed inside the function")

    @contextmanager
    def usual_dtype(self) -> Iterator[None]:
        """With the default dtype that recorded ops will run under."""
        now = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(now)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.watched = True
        try:
            yield
            self.check()
            if self.other_dtype:
                self.refuse_dtype()
        finally:
            self.watched = False


@contextmanager
def tracing(*modes: object, veiled: bool = False) -> Iterator[None]:
    """Functionalization and the given modes on; random state, grad mode, hooks and engine shielded.

    `veiled`: functionalization works behind veils only (see `veils`).
    """
    grad_mode = torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(RECORDING)
        if torch.is_inference_mode_enabled():  # composite ops are taken apart by autograd's layer only
            stack.enter_context(torch.inference_mode(False))
            set_grad_enabled(False)
        stack.enter_context(random.shielded())
        stack.enter_context(saved_tensor_hooks_off())
        stack.enter_context(plain_engine())
        stack.enter_context(functional.enabled())
        if veiled:
            stack.enter_context(functional.not_here())
        stack.enter_context(quiet_logs())
        stack.enter_context(no_trace_in_globals())
        if torch.is_anomaly_enabled():  # it looks at values, of which there are none here
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for mode in modes:
            stack.enter_context(mode)  # type: ignore[arg-type]
        try:
            yield
        finally:
            set_grad_enabled(grad_mode)

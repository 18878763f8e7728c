"""Writes in a backward: a custom backward may change inputs, buffers, or the gradient it is given.

Such a write stands in the backward program as a `copy_` to the tensor itself. Afterwards the trace
is put back, because the next backward recorded in it belongs to another call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aheadgrad.capture.session import Session
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import set_version, version
from aheadgrad.torchlayer.dispatch import no_function_modes
from aheadgrad.torchlayer.subclasses import parts_of, values_of

_COPY = torch.ops.aten.copy_.default


class BackwardWrites:
    """Notes what inputs and tangents hold, and records what has changed since."""

    def __init__(self, session: Session, tangents: list[tuple[Tensor, Tensor]]) -> None:
        self.session = session
        known = [
            pair for e in session.entrances for pair in zip(values_of(e.value), parts_of(e.seen), strict=True)
        ]
        known += tangents
        self.before = [(value, seen, functional.unwrap(seen), version(seen)) for value, seen in known]

    def record(self) -> None:
        with no_function_modes(), torch.no_grad():
            for value, seen, held, at in self.before:
                if version(seen) == at and not self.session.veiled:
                    continue  # (the parts of a subclass are written without a word)
                functional.sync(seen)
                now = functional.unwrap(seen)
                if now is held:
                    continue
                self.session.trace.add(_COPY, (value, now), {}, None)
                functional.replace(seen, held)
                functional.commit_update(seen)
                functional.sync(seen)
                set_version(seen, at)

"""Bytes that one forward keeps for its backward, counted in the same way for everyone.

The count is of storages, each once, that pass through autograd's saved-tensor hooks; parameters,
buffers and inputs are there anyway and are not counted.
"""

from collections.abc import Callable

from torch import Tensor, nn

import aheadgrad
from examples.char_transformer import saved_bytes

from . import peer
from .measure import EAGER, OURS, TORCH, Bar, Row
from .models import CASES, Case

LIMIT = 1.00


def kilobytes(case: Case, compile_model: Callable[[nn.Module], Callable[..., Tensor]]) -> float:
    model = case.fresh()
    forward = compile_model(model)
    forward(*case.inputs).backward()  # compile first, so that nothing of the capture is counted
    return saved_bytes(lambda: forward(*case.inputs), case.known(model)) / 1024


def run() -> list[Row]:
    rows = []
    for make in CASES:
        case = make()
        figures = {
            EAGER: kilobytes(case, lambda model: model),
            TORCH: kilobytes(case, peer.compile_module),
            OURS: kilobytes(case, lambda model: aheadgrad.compile(model, fallback="error", frontend="trace")),
        }
        rows.append(Row(f"saved by {case.name}", "KiB", figures, (Bar(TORCH, LIMIT),)))
    return rows

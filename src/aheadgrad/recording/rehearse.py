"""Ops whose results nobody uses are not in the program, but eager would run them, and may raise.

Kernels refuse some dtypes that fake tensors let through. So unused ops are run once, when the
entry is compiled: what they raise depends only on what the entry assumes anyway. Those that need the result
of an op with an effect (a collective, which other processes would wait for) are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.eager import compile_eager
from aheadgrad.program.opened import opened
from aheadgrad.program.slots import Slot
from aheadgrad.recording.captured import Captured
from aheadgrad.recording.ports import Port
from aheadgrad.torchlayer import random
from aheadgrad.torchlayer.dispatch import is_random, is_view_op
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import parts_of, values_of
from aheadgrad.torchlayer.symbols import is_symbolic, number_hint

_NEVER_RAISE = {
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
}


def rehearse(captured: Captured) -> None:
    """Runs the unused ops of the forward on the real inputs."""
    reals = [part for e in captured.session.entrances for part in parts_of(e.real)]
    ragged = any(is_symbolic(n) for e in captured.session.entrances for n in e.real.shape)
    if ragged or any(isinstance(r, FakeTensor) for r in reals) or captured.forward.number_slots:
        return
    cutter = captured.cutter
    entering = opened([(e.slot, e.value) for e in captured.session.entrances])
    boundary = {id(value) for _, value in entering}
    given = [s for s in captured.scalars if is_symbolic(s.value)]
    entering += [(s.slot, s.value) for s in given]
    leaving = [v for e in captured.exits for v in values_of(e.value)]
    used, _ = cutter.needed(leaving, boundary, {"forward"})
    unused: list[Any] = []
    after: set[int] = set()  # ids of values that come after an effect
    for i, record in enumerate(captured.session.trace.records):
        if record.phase != "forward":
            continue
        parts = record.out if isinstance(record.out, list | tuple) else (record.out,)
        made = [p for p in parts if isinstance(p, Tensor)]
        if (record.keep and not is_random(record.target)) or any(id(t) in after for t in record.tensors()):
            after.update(map(id, made))
        elif i not in used and not is_view_op(record.target) and record.target not in _NEVER_RAISE:
            unused += made[:1]
    if not unused:
        return
    inputs = [Port(slot, value, f"input_{i}") for i, (slot, value) in enumerate(entering)]
    program = cutter.cut("rehearsal", inputs, [(Slot(), value) for value in unused])
    with torch.no_grad(), random.preserved():
        compile_eager(program)([*reals, *(number_hint(s.value) for s in given)])

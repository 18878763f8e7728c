"""Ops whose results nobody uses are not in the program, but eager would run them, and may raise.

Kernels refuse some dtypes that fake tensors let through. So unused ops are run once, when the
entry is compiled: what they raise depends only on what the entry assumes anyway. Those that need the result
of an op with an effect (a collective, which other processes would wait for) are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aheadgrad.backends.eager import compile_eager
from aheadgrad.joint.level import Joint
from aheadgrad.program.slots import Slot, opened
from aheadgrad.program.values import Port, Value
from aheadgrad.torchlayer import random
from aheadgrad.torchlayer.dispatch import is_random, is_view_op
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import parts_of, values_of
from aheadgrad.torchlayer.symbols import Number, is_symbolic, number_hint

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


def rehearse(joint: Joint, given: list[Tensor]) -> None:
    """Runs the unused ops of the forward on the real inputs."""
    reals = [part for t in given for part in parts_of(t)]
    ragged = any(is_symbolic(n) for t in given for n in t.shape)
    if ragged or any(isinstance(r, FakeTensor) for r in reals):
        return
    unused = _unused(joint)
    if not unused:
        return
    entering = opened((e.slot, e.value) for e in joint.entrances)
    numbers = [(slot, value) for slot, value in joint.wholes if type(value) is Number]
    inputs = [Port(slot, value, f"input_{i}") for i, (slot, value) in enumerate([*entering, *numbers])]
    program = joint.cutter().cut("rehearsal", inputs, [(Slot(), value) for value in unused])
    with torch.no_grad(), random.preserved():
        compile_eager(program).call([*reals, *(number_hint(value) for _, value in numbers)])


def _unused(joint: Joint) -> list[Value]:
    """A result of each op that nobody needs, that may raise, and that comes after no effect."""
    boundary = {v for e in joint.entrances for v in values_of(e.value)}
    leaving = [v for e in joint.leaving for v in values_of(e.value)]
    used, _ = joint.cutter().needed(leaving, boundary, {"forward"})
    found: list[Value] = []
    after: set[Value] = set()
    for i, op in enumerate(joint.tape.ops):
        if op.phase != "forward":
            continue
        if (op.keep and not is_random(op.target)) or any(v in after for v in op.uses):
            after.update(op.values)
        elif i not in used and not is_view_op(op.target) and op.target not in _NEVER_RAISE:
            found += list(op.values)[:1]
    return found

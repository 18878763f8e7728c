"""Saved values whose memory a backward may use for something else, if the graph is not kept.

The forward made them, for this backward alone: nobody else holds a tensor in the same memory.
"""

from __future__ import annotations

from collections import Counter

from aheadgrad.joint.level import Joint
from aheadgrad.partition.saved import Split
from aheadgrad.program.opened import opened
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.dispatch import OpOverload

_OWN_MEMORY = ("aten", "prims")  # whose results share memory as their schemas say


def donated(joint: Joint, parts: Split) -> frozenset[Value]:
    """Of all that is saved, what may be given away."""
    if joint.veiled or any(s.copied for saved in parts.saved for s in saved.tensors):
        return frozenset()
    tape = joint.tape
    saved = [s.value for kept in parts.saved for s in kept.tensors]
    held = Counter(map(tape.view_source, saved))
    leaving = (value for _, value in opened((e.slot, e.value) for e in joint.leaving))
    held.update(tape.view_source(value) for value in leaving if type(value) is Value)
    found = set()
    for value in saved:
        op = tape.of(value)
        if op is None or not any(v is value for v in op.values):  # a partition function's own
            continue
        own = isinstance(op.target, OpOverload) and op.target.namespace in _OWN_MEMORY
        if own and op.viewed is None and held[value] == 1:
            found.add(value)
    return frozenset(found)

"""Backwards for some of the gradients, cut out of the one that was recorded for all of them."""

from __future__ import annotations

from aheadgrad.joint.level import Gradients, Level
from aheadgrad.partition.saved import SavedSet
from aheadgrad.partition.split import backward_program
from aheadgrad.program.program import Program
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.wanted import Wanted

_FEW_OPS, _FEW_BYTES = 4, 1 << 14


def program_of_wanted(level: Level, whole: Gradients, saved: SavedSet, wanted: Wanted) -> Program | None:
    """The ops of a recorded backward that the wanted gradients need, and no others.

    None where autograd would have run other ops for these gradients alone: an op that makes several
    (`convolution_backward`) is told which of them to make.
    """
    program = backward_program(level, whole.only(wanted), saved)
    used = _used(program)
    idle = {v for op in program.ops for v in op.values if v not in used}
    if idle and not idle.isdisjoint(_used(backward_program(level, whole, saved))):
        return None
    return program


def is_little(program: Program | None) -> bool:
    """Is running a whole backward cheaper than asking which of its gradients are wanted?"""
    if program is None or len(program.ops) > _FEW_OPS:
        return False
    return bool(sum(v.type.bytes for op in program.ops for v in op.values) <= _FEW_BYTES)


def _used(program: Program) -> set[Value]:
    found = {v for op in program.ops for v in op.uses}
    return found | {v for v in program.results if type(v) is Value}

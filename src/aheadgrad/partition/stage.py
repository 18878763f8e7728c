"""The partition stage: what is saved, and the programs on either side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aheadgrad.capture.joint import Gradients
from aheadgrad.capture.stage import Captured
from aheadgrad.options import Options
from aheadgrad.partition.default import choose
from aheadgrad.partition.split import SavedSet, SavedValue, backward_program, forward_program
from aheadgrad.program.program import Program


@dataclass(eq=False)
class SplitPrograms:
    """The forward, one backward per component, and what goes between."""

    forward: Program
    backwards: list[Program | None]
    saved: list[SavedSet]
    all_saved: SavedSet
    gradients: list[Gradients | None] = field(default_factory=list)


def partition(captured: Captured, options: Options) -> SplitPrograms:
    saved: list[SavedSet] = []
    changed = frozenset(
        id(captured.session.entrances[f.index].value)
        for f in captured.facts.inputs
        if f.data_changed or f.storage_changed
    )
    for g in captured.gradients:
        if g is None:
            saved.append(SavedSet())
        else:
            saved.append(choose(captured.cutter, captured.inputs, captured.exits, [g], changed))
    together = _union(captured, saved)
    inference = not captured.joint.components
    forward = forward_program(
        captured.cutter, captured.inputs, captured.exits, together, inference=inference
    )
    backwards: list[Program | None] = []
    for g, kept in zip(captured.gradients, saved, strict=True):
        backwards.append(None if g is None else backward(captured, g, kept))
    return SplitPrograms(forward, backwards, saved, together, captured.gradients)


def backward(captured: Captured, gradients: Gradients, saved: SavedSet) -> Program:
    slots = captured.target_slots(gradients.component)
    return backward_program(captured.cutter, captured.joint, gradients, saved, slots)


def _union(captured: Captured, saved: list[SavedSet]) -> SavedSet:
    if len(saved) == 1:
        return saved[0]
    tensors: dict[int, SavedValue] = {}
    sizes: dict[str, Any] = {}
    for one in saved:
        for value in one.tensors:
            tensors.setdefault(id(value.value), value)
        sizes.update(dict(one.sizes))
    return SavedSet(tuple(tensors.values()), tuple(sizes.items()))

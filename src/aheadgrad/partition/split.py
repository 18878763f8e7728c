"""Splitting: `primals -> (outs, saved)` and `(saved, tangents) -> grads`.

A partitioner chooses the values to save; only this file builds the two programs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aheadgrad.conventions import in_graph
from aheadgrad.errors import InvalidProgram
from aheadgrad.program.check import check
from aheadgrad.program.opened import opened
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Saved, SavedSize, Slot, Tangent
from aheadgrad.recording.cut import Cutter
from aheadgrad.recording.joint import Gradients
from aheadgrad.recording.ports import Port
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import free_symbols

if TYPE_CHECKING:
    from aheadgrad.recording.captured import Captured
    from aheadgrad.recording.orders import Derivative


@dataclass(frozen=True, eq=False)
class SavedValue:
    """One value kept for the backward. `value` is the traced tensor.

    `copied`: what is kept is a copy of an input, which the graph made before the input changed.
    """

    value: Tensor
    name: str
    reason: str
    copied: bool = False


@dataclass(frozen=True, eq=False)
class SavedSet:
    """Everything the forward keeps: tensors, and sizes as numbers."""

    tensors: tuple[SavedValue, ...] = ()
    sizes: tuple[tuple[str, Any], ...] = ()


@dataclass(eq=False)
class SplitPrograms:
    """The forward, one backward per component, and what goes between."""

    forward: Program
    backwards: list[Program | None]
    saved: list[SavedSet]
    all_saved: SavedSet
    gradients: list[Gradients | None] = field(default_factory=list)


def primal_ports(inputs: list[tuple[Slot, Any]], prefix: str = "primals") -> list[Port]:
    if prefix == "arg":
        return [Port(slot, value, f"arg{i}_1") for i, (slot, value) in enumerate(inputs)]
    return [Port(slot, value, f"{prefix}_{i + 1}") for i, (slot, value) in enumerate(inputs)]


def forward_program(captured: Captured, saved: SavedSet, *, inference: bool) -> Program:
    outputs = opened(in_graph.results(captured, inference=inference))
    outputs += [(Saved(s.name, s.reason), s.value) for s in saved.tensors]
    outputs += [(SavedSize(name), number) for name, number in saved.sizes]
    ports = primal_ports(captured.inputs, "arg" if inference else "primals")
    role = "inference" if inference else "forward"
    return check(captured.cutter.cut(role, ports, outputs, {"forward"}, in_graph.writes(captured)))


def tangent_name(level: Captured | Derivative, number: int) -> str:
    """`tangents_1`, as all backends expect; from the second order on the order is in the name."""
    return f"tangents_{number + 1}" if level.order == 0 else f"tangents_{number + 1}_{level.order + 1}"


def backward_program(captured: Captured | Derivative, gradients: Gradients, saved: SavedSet) -> Program:
    """From what the forward saved to gradients. Sizes come first, as backends expect."""
    ports = [Port(SavedSize(name), number, name) for name, number in saved.sizes]
    ports += [Port(Saved(s.name, s.reason), s.value, s.name) for s in saved.tensors]
    number = 0
    for i, value in zip(gradients.component.exits, gradients.tangents, strict=True):
        for slot, tangent in opened([(Tangent(captured.joint.exits[i].slot), value)]):
            if tangent is not None:
                ports.append(Port(slot, tangent, tangent_name(captured, number)))
            number += 1
    outputs = opened(captured.gradient_outputs(gradients))
    cutter = captured.cutter
    merging = cutter.merging_views({id(s.value) for s in saved.tensors}) if captured.order else nullcontext()
    try:
        with merging:
            return check(cutter.cut("backward", ports, outputs, {gradients.phase}))
    except AssertionError as error:
        raise InvalidProgram(
            f"A backward for this pattern of tangents needs a value that the forward did not save ({error})."
        ) from error


def needed_symbols(cutter: Cutter, gradients: list[Gradients], saved: list[SavedValue]) -> list[Any]:
    """Symbols that the backward's ops, or the tensors it is given, mention in their sizes."""
    tangents = [v for g in gradients for t in g.tangents if t is not None for v in values_of(t)]
    given = [s.value for s in saved] + tangents
    boundary = {id(t) for t in given}
    needed = free_symbols(given)
    for g in gradients:
        grads = [v for grad in g.grads for v in values_of(grad)]
        records, _ = cutter.needed(grads, boundary, {g.phase})
        for i in records:
            record = cutter.trace.records[i]
            needed |= free_symbols([list(record.args), record.kwargs])
    return sorted(needed, key=str)

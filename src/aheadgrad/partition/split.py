"""Splitting: `primals -> (outs, saved)` and `(saved, tangents) -> grads`.

A partitioner chooses the values to save; only this file builds the two programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aheadgrad.capture.cut import Cutter, Port
from aheadgrad.capture.exits import Exit
from aheadgrad.capture.joint import Gradients, Joint
from aheadgrad.errors import InvalidProgram
from aheadgrad.program.check import check
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Gradient, Saved, SavedSize, Slot, Tangent
from aheadgrad.torchlayer.symbols import free_symbols


@dataclass(frozen=True, eq=False)
class SavedValue:
    """One value kept for the backward. `value` is the traced tensor."""

    value: Tensor
    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class SavedSet:
    """Everything the forward keeps: tensors, and sizes as numbers."""

    tensors: tuple[SavedValue, ...] = ()
    sizes: tuple[tuple[str, Any], ...] = ()


@dataclass(eq=False)
class Split:
    forward: Program
    backwards: list[Program]
    saved: SavedSet


def primal_ports(inputs: list[tuple[Slot, Any]], prefix: str = "primals") -> list[Port]:
    if prefix == "arg":
        return [Port(slot, value, f"arg{i}_1") for i, (slot, value) in enumerate(inputs)]
    return [Port(slot, value, f"{prefix}_{i + 1}") for i, (slot, value) in enumerate(inputs)]


def forward_program(
    cutter: Cutter, inputs: list[tuple[Slot, Any]], exits: list[Exit], saved: SavedSet, *, inference: bool
) -> Program:
    outputs: list[tuple[Slot, Any]] = [(e.slot, e.value) for e in exits]
    outputs += [(Saved(s.name, s.reason), s.value) for s in saved.tensors]
    outputs += [(SavedSize(name), number) for name, number in saved.sizes]
    ports = primal_ports(inputs, "arg" if inference else "primals")
    return check(cutter.cut("inference" if inference else "forward", ports, outputs, {"forward"}))


def backward_program(
    cutter: Cutter, joint: Joint, gradients: Gradients, saved: SavedSet, slots: list[Slot]
) -> Program:
    """From what the forward saved to gradients. Sizes come first, as backends expect."""
    ports = [Port(SavedSize(name), number, name) for name, number in saved.sizes]
    ports += [Port(Saved(s.name, s.reason), s.value, s.name) for s in saved.tensors]
    for number, (i, value) in enumerate(zip(gradients.component.exits, gradients.tangents, strict=True)):
        if value is not None:
            ports.append(Port(Tangent(joint.exits[i].slot), value, f"tangents_{number + 1}"))
    outputs = [(Gradient(slot), grad) for slot, grad in zip(slots, gradients.grads, strict=True)]
    try:
        return check(cutter.cut("backward", ports, outputs, {gradients.phase}))
    except AssertionError as error:
        raise InvalidProgram(
            f"A backward for this pattern of tangents needs a value that the forward did not save ({error})."
        ) from error


def missing_sizes(cutter: Cutter, gradients: list[Gradients], saved: list[SavedValue]) -> list[Any]:
    """Symbols that the backward needs and that no saved tensor or tangent carries in its sizes."""
    boundary = {id(s.value) for s in saved}
    boundary |= {id(t) for g in gradients for t in g.tangents if t is not None}
    needed: set[Any] = set()
    for g in gradients:
        records, _ = cutter.needed(g.grads, boundary, {g.phase})
        for i in records:
            record = cutter.trace.records[i]
            needed |= free_symbols([list(record.args), record.kwargs])
    return sorted(needed, key=str)

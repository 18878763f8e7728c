"""Updates kept inside the graph, and copies that stand before an update: conventions of the drop-in.

With `keep_inference_input_mutations` an input's new value is written by the graph itself,

    copy_ = torch.ops.aten.copy_.default(arg0_1, mul)

unless autograd has to see the write. A graph with a backward that does not keep an update begins
with a copy of that input (`clone`; `view` when only its sizes change), as every backend of
PyTorch knows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.facts.facts import Facts, InputFacts, TheInput
from aheadgrad.program.slots import Slot, UserOutput
from aheadgrad.recording.ports import Write, Written
from aheadgrad.torchlayer import functional

if TYPE_CHECKING:
    from aheadgrad.recording.captured import Captured
    from aheadgrad.recording.session import Session

aten = torch.ops.aten


def kept_inside(session: Session, facts: Facts, *, keep: bool) -> frozenset[int]:
    """Inputs whose update the graph makes itself: those that autograd need not see.

    The graph knows nothing of tensor subclasses, which are updated as wholes.
    """
    plain = {i for i, e in enumerate(session.entrances) if e.form is None}
    return frozenset(f.index for f in facts.inputs if keep and f.index in plain and _can_stay(f))


def _can_stay(fact: InputFacts) -> bool:
    if fact.index < 0 or fact.history_changed or fact.history_dropped:
        return False
    if fact.final_bytes is not None:
        return False  # emptied at the very end, after its update
    if fact.storage_changed:
        return True
    return fact.data_changed and fact.geometry is None


def writes(captured: Captured) -> list[Write]:
    """The updates kept inside, in the order of the inputs."""
    found = []
    for fact in captured.facts.inputs:
        if fact.index in captured.in_graph_updates:
            entrance = captured.session.entrances[fact.index]
            new: Tensor = functional.unwrap(captured.session.disguises.current(entrance.seen))
            if fact.storage_changed:
                found.append(Write(aten.set_.source_Tensor, entrance.value, new))
            if fact.data_changed and not fact.storage_changed:
                found.append(Write(aten.copy_.default, entrance.value, new))
    return found


def results(captured: Captured, *, inference: bool) -> list[tuple[Slot, Any]]:
    """What the forward returns: an input that the graph updated and the user returned is itself."""
    found: list[tuple[Slot, Any]] = []
    for e in captured.exits:
        value = e.value
        if isinstance(e.slot, UserOutput):
            fact = captured.facts.outputs[e.slot.index]
            if isinstance(fact, TheInput) and fact.index in captured.in_graph_updates:
                given = captured.session.entrances[fact.index].value
                value = Written(given) if inference else given
        found.append((e.slot, value))
    return found


def copies(session: Session, facts: Facts, kept: frozenset[int]) -> list[tuple[Tensor, Any]]:
    """Inputs that a graph with a backward copies first, because they change outside of it."""
    found: list[tuple[Tensor, Any]] = []
    for fact in facts.inputs:
        if fact.index < 0 or fact.index in kept or fact.storage_changed:
            continue
        if fact.final_bytes is not None:
            continue  # its memory comes and goes: there may be nothing to copy yet
        entrance = session.entrances[fact.index]
        if fact.data_changed and session.disguises.current(entrance.seen).requires_grad:
            found.append((entrance.value, aten.clone.default))
        elif fact.geometry is not None and not fact.data_changed:
            found.append((entrance.value, aten.view.default))
    return found

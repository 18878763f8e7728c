"""Where the entry function finds the values that a node saves: an input, or a result of the forward."""

from __future__ import annotations

from torch import Tensor

from aheadgrad.facts.facts import InputFacts
from aheadgrad.partition.split import SavedValue, SplitPrograms
from aheadgrad.program.slots import UpdatedInput
from aheadgrad.recording.captured import Captured
from aheadgrad.recording.components import Component
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.subclasses import part_names, values_of


class SavedNames:
    """Names of saved values in one entry function."""

    def __init__(self, captured: Captured, split: SplitPrograms) -> None:
        self.captured = captured
        self.first = len(captured.exits)
        self.inputs = {
            id(value): name
            for i, e in enumerate(captured.session.entrances)
            for value, name in zip(values_of(e.value), part_names(e.value, f"p{i}"), strict=True)
        }
        for fact, value in updates(captured):
            if not fact.history_changed and fact.geometry is None and fact.index >= 0 and fact.parts is None:
                # The input holds the same values by now, and eager saves it too.
                self.inputs.setdefault(id(value), f"p{fact.index}")
        self.exits: dict[int, list[int]] = {}
        for i, e in enumerate(captured.exits):
            self.exits.setdefault(id(e.value), []).append(i)
        self.positions: dict[int, int] = {}
        for k, saved in enumerate(split.all_saved.tensors):
            self.positions.setdefault(id(saved.value), k)
        self.copies = {id(s): k for k, s in enumerate(split.all_saved.tensors) if s.copied}
        self.versions_move = any(f.version_bumps for f in captured.facts.inputs)

    def of(self, component: Component, saved: SavedValue) -> str:
        value = saved.value
        if saved.copied:
            return f"r{self.first + self.copies[id(saved)]}"
        known = self.inputs.get(id(value))
        if known is not None:
            return known
        exits = self.exits.get(id(value), [])
        own = next((i for i in exits if i in component.exits), None)
        if own is None:
            own = next((t.index for t in component.targets if t.kind == "exit" and t.index in exits), None)
        if own is not None:
            return f"r{own}"
        shared = any(self.captured.exits[i].differentiable for i in exits)
        if self.versions_move:
            trace = self.captured.session.trace
            made = trace.producer(value)
            shared |= made is not None and is_view_op(trace.records[made.record].target)
        return f"r{self.first + self.positions[id(value)]}" + (".detach()" if shared else "")


def updates(captured: Captured) -> list[tuple[InputFacts, Tensor]]:
    """Inputs whose data the call changes in sight of the version counter, with their new values."""
    exits = iter(e for e in captured.exits if isinstance(e.slot, UpdatedInput))
    found = []
    for fact in captured.facts.inputs:
        if fact.index in captured.in_graph_updates:
            continue
        if fact.data_changed or fact.geometry or fact.storage_changed:
            value = next(exits).value
            if fact.data_changed and not fact.storage_changed and fact.version_bumps:
                found.append((fact, value))
    return found

"""Where the entry function finds the values that a node saves: an input, or a result of the forward."""

from __future__ import annotations

from typing import Any

from aheadgrad.facts.facts import InputFacts
from aheadgrad.joint.level import Component, Joint
from aheadgrad.partition.saved import SavedValue, Split
from aheadgrad.program.slots import UpdatedInput
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.subclasses import part_names, values_of


class SavedNames:
    """Names of saved values in one entry function."""

    def __init__(self, joint: Joint, split: Split) -> None:
        self.joint = joint
        self.first = joint.count
        self.inputs: dict[Value, str] = {
            value: name
            for i, e in enumerate(joint.entrances)
            for value, name in zip(values_of(e.value), part_names(e.value, f"p{i}"), strict=True)
        }
        kept = {memory for c in joint.components for saves in c.saves for memory in saves}
        for fact, value in updates(joint):
            if fact.history_changed or fact.geometry is not None or fact.index < 0 or fact.parts is not None:
                continue
            if fact.version_bumps or joint.entrances[fact.index].memory in kept:
                # The input holds the same values by now, and eager saves it too.
                self.inputs.setdefault(value, f"p{fact.index}")
        self.exits: dict[Value, list[int]] = {}
        for i, e in enumerate(joint.leaving):
            if type(e.value) is Value:
                self.exits.setdefault(e.value, []).append(i)
        self.positions: dict[Value, int] = {}
        for k, saved in enumerate(split.all_saved.tensors):
            self.positions.setdefault(saved.value, k)
        self.copies = {s: k for k, s in enumerate(split.all_saved.tensors) if s.copied}
        self.versions_move = any(f.version_bumps for f in joint.facts.inputs)

    def of(self, component: Component, saved: SavedValue) -> str:
        value = saved.value
        if saved.copied:
            return f"r{self.first + self.copies[saved]}"
        known = self.inputs.get(value)
        if known is not None:
            return known
        exits = self.exits.get(value, [])
        own = next((i for i in exits if i in component.exits), None)
        if own is None:
            own = next((t.index for t in component.targets if t.kind == "exit" and t.index in exits), None)
        if own is not None:
            return f"r{own}"
        shared = any(self.joint.exits[i].differentiable for i in exits)
        shared |= self.versions_move and self.joint.tape.is_view(value)
        return f"r{self.first + self.positions[value]}" + (".detach()" if shared else "")


def updates(joint: Joint) -> list[tuple[InputFacts, Any]]:
    """Inputs whose data the call changes, with their new values."""
    exits = iter(e for e in joint.leaving if isinstance(e.slot, UpdatedInput))
    found = []
    for fact in joint.facts.inputs:
        if fact.index not in joint.in_graph and fact.is_updated:
            value = next(exits).value
            if fact.data_changed and not fact.storage_changed:
                found.append((fact, value))
    return found

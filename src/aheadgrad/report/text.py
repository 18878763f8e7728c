"""Explanations as text: what was captured, what is saved and why, what happens around the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from aheadgrad.facts.facts import Facts
from aheadgrad.joint.level import Joint
from aheadgrad.partition.saved import Split
from aheadgrad.partition.split import split
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Signature
from aheadgrad.report.journal import Journal
from aheadgrad.report.memory import MemoryReport, memory_report

_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True, eq=False)
class Captured:
    """The joint program of one call, and what was found about it."""

    joint: Joint
    journal: Journal

    @property
    def program(self) -> Program:
        return self.joint.program

    @property
    def graph(self) -> Any:
        return self.program.graph

    @property
    def signature(self) -> Signature:
        return self.program.signature

    @property
    def facts(self) -> Facts:
        return self.joint.facts

    def explain(self) -> str:
        """The joint program, what was found about inputs and outputs, the time of each stage."""
        return f"{explain_joint(self.joint, self.journal)}\n\n{self.memory()}"

    def memory(self) -> MemoryReport:
        """What the default partition would save, and what budgets would change."""
        return memory_report(self.joint, split(self.joint), budgets=_BUDGETS)

    def __str__(self) -> str:
        return str(self.program)


class Compiled(Protocol):
    """What an entry tells of itself."""

    joint: Joint
    split: Split
    journal: Journal


def explain_joint(joint: Joint, journal: Journal) -> str:
    lines = [str(joint.program), "", "facts:"]
    for fact, entrance in zip(joint.facts.inputs, joint.entrances, strict=False):
        if not fact.untouched:
            lines.append(f"  {entrance.slot.describe()}: {fact}")
    lines += [f"  output {j}: {fact}" for j, fact in enumerate(joint.facts.outputs)]
    lines += [f"  root {r}: {root}" for r, root in enumerate(joint.facts.roots)]
    for number, error in joint.failures.items():
        lines.append(f"  backward {number} raises as in eager: {str(error).splitlines()[0]}")
    return "\n".join([*lines, str(journal)])


def explain_entry(number: int, entry: Compiled) -> str:
    memory = memory_report(entry.joint, entry.split, budgets=_BUDGETS if entry.split.backwards else ())
    return "\n".join([f"entry {number}", explain_joint(entry.joint, entry.journal), "", str(memory)])


def summary(entry: Compiled) -> str:
    """`12 ops forward, 20 backward; saves 3 tensors, 4.0 KiB`: an entry in one line."""
    split = entry.split
    backward = sum(len(p.ops) for p in split.backwards if p is not None)
    text = f"{len(split.forward.ops)} ops forward"
    if not backward:
        return text
    tensors = split.all_saved.tensors
    size = sum(s.value.type.bytes for s in tensors)
    return f"{text}, {backward} backward; saves {len(tensors)} tensors, {_bytes(size)}"


def _bytes(size: int) -> str:
    units = ("bytes", "KiB", "MiB", "GiB")
    power = min((max(size, 1).bit_length() - 1) // 10, 3)
    return f"{size} bytes" if not power else f"{size / 1024**power:.1f} {units[power]}"

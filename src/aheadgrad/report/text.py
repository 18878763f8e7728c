"""Explanations as text: what was captured, what is saved and why, what happens around the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aheadgrad.program.show import type_text

if TYPE_CHECKING:
    from aheadgrad.program.program import Program
    from aheadgrad.recording.captured import Captured
    from aheadgrad.runtime.entry import Entry


def explain_captured(captured: Captured) -> str:
    lines = [str(captured.program), "", "facts:"]
    for fact, entrance in zip(captured.facts.inputs, captured.session.entrances, strict=False):
        if not fact.untouched:
            lines.append(f"  {entrance.slot.describe()}: {fact}")
    lines += [f"  output {j}: {fact}" for j, fact in enumerate(captured.facts.outputs)]
    lines += [f"  root {r}: {root}" for r, root in enumerate(captured.facts.roots)]
    for number, error in captured.failures.items():
        lines.append(f"  backward {number} raises as in eager: {str(error).splitlines()[0]}")
    return "\n".join([*lines, str(captured.journal)])


def explain_entry(number: int, entry: Entry) -> str:
    lines = [f"entry {number}", explain_captured(entry.captured), "", "saved for backward:"]
    total = 0
    for saved in entry.split.all_saved.tensors:
        size = saved.value.numel() * saved.value.element_size()
        total += int(size)
        lines.append(f"  {saved.name}: {type_text(saved.value)}, {size} bytes, {saved.reason}")
    lines += [f"  {name}: a size" for name, _ in entry.split.all_saved.sizes]
    lines.append(f"  together {total} bytes")
    return "\n".join(lines)


def summary(entry: Entry) -> str:
    """`12 ops forward, 20 backward; saves 3 tensors, 4.0 KiB`: an entry in one line."""
    split = entry.split
    backward = sum(_ops(p) for p in split.backwards if p is not None)
    text = f"{_ops(split.forward)} ops forward"
    if not backward:
        return text
    tensors = split.all_saved.tensors
    size = sum(int(s.value.numel() * s.value.element_size()) for s in tensors)
    return f"{text}, {backward} backward; saves {len(tensors)} tensors, {_bytes(size)}"


def _ops(program: Program) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


def _bytes(size: int) -> str:
    units = ("bytes", "KiB", "MiB", "GiB")
    power = min((max(size, 1).bit_length() - 1) // 10, 3)
    return f"{size} bytes" if not power else f"{size / 1024**power:.1f} {units[power]}"

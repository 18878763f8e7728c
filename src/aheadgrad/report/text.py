"""Explanations as text: what was captured, what is saved and why, what happens around the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aheadgrad.program.show import type_text

if TYPE_CHECKING:
    from aheadgrad.capture.stage import Captured
    from aheadgrad.runtime.stage import Entry


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

"""A file as text: the export in it, and what its programs save for a backward."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from aheadgrad.export.exported import Exported
from aheadgrad.export.file import VERSION
from aheadgrad.program.program import Program
from aheadgrad.program.show import type_text
from aheadgrad.program.slots import Saved, SavedSize
from aheadgrad.program.values import Value
from aheadgrad.report.memory import SavedTensor


def shown(path: str | os.PathLike[str], *, trust: Collection[str] = ()) -> str:
    """The text of a file; ArtifactError if it cannot be loaded."""
    exported = Exported.load(path, trust=trust, here=False)
    held = sum(t.numel() * t.element_size() for t in exported.state.values())
    lines = [
        f"{Path(path).name}: format {VERSION}, {Path(path).stat().st_size} bytes, "
        f"{len(exported.state)} tensors of {held} bytes",
        "",
        str(exported),
    ]
    for stage in exported.stages:
        for program in stage.programs:
            lines += saved_lines(program)
    return "\n".join(lines)


def saved_lines(program: Program) -> list[str]:
    """What a forward saves: bytes and reasons."""
    saved = [(slot, v) for slot, v in program.outputs if isinstance(slot, Saved | SavedSize)]
    if not saved:
        return []
    made = {v: op for op in program.ops for v in op.values}
    lines, total = ["", "saved for backward:"], 0
    for slot, v in saved:
        if type(v) is not Value:
            lines.append(f"  {v}: a size")
            continue
        op = made.get(v)
        total += v.type.bytes if op is not None else 0
        line = "" if op is None else str(op.origin or "")
        reason = slot.reason if isinstance(slot, Saved) else ""
        told = SavedTensor(slot.name, type_text(v), v.type.bytes, op is None, line, reason)
        lines.append(f"  {told}")
    return [*lines, f"  together {total} bytes, besides inputs"]

"""A file as text: what it holds, its programs, and what they save for a backward."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from aheadgrad.export.file import VERSION, read
from aheadgrad.export.signature import Stage
from aheadgrad.export.text import signature_lines
from aheadgrad.program.program import Program
from aheadgrad.program.show import type_text
from aheadgrad.program.slots import Saved, SavedSize
from aheadgrad.program.values import Op, Value


def shown(path: str | os.PathLike[str], *, trust: Collection[str] = ()) -> str:
    """The text of a file; ArtifactError if it cannot be loaded."""
    value, state = read(path, trust=trust, here=False)
    held = sum(t.numel() * t.element_size() for t in state.values())
    lines = [
        f"{Path(path).name}: format {VERSION}, {Path(path).stat().st_size} bytes, "
        f"{len(state)} tensors of {held} bytes"
    ]
    lines += [f"  {name}: {_look(t)}" for name, t in state.items()]
    for stage in value if type(value) is tuple else ():
        if type(stage) is Stage:
            lines += ["", *signature_lines(stage.signature)]
    for program in programs_in(value):
        lines += ["", str(program), *saved_lines(program)]
    return "\n".join(lines)


def _look(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def programs_in(value: Any) -> Iterator[Program]:
    """The programs that a value is made of, in order and once each."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, Value | Op):
            continue
        seen.add(id(found))
        if type(found) is Program:
            yield found
        elif isinstance(found, list | tuple):
            todo += reversed(found)
        elif isinstance(found, dict):
            todo += reversed(found.values())
        elif is_dataclass(found):
            todo += reversed([getattr(found, f.name) for f in fields(found)])


def saved_lines(program: Program) -> list[str]:
    """What a forward saves: bytes and reasons."""
    saved = [(slot, v) for slot, v in program.outputs if isinstance(slot, Saved | SavedSize)]
    if not saved:
        return []
    made = {v: op for op in program.ops for v in op.values}
    lines, total = ["saved for backward:"], 0
    for slot, v in saved:
        if type(v) is not Value:
            lines.append(f"  {v}: a size")
            continue
        op = made.get(v)
        total += v.type.bytes if op is not None else 0
        where = "an input" if op is None else str(op.origin or "")
        reason = slot.reason if isinstance(slot, Saved) else ""
        told = [f"{type_text(v)}", f"{v.type.bytes} bytes", *filter(None, [reason])]
        lines.append(f"  {slot.name}: {', '.join(told)}" + (f"  # {where}" if where else ""))
    return [*lines, f"  together {total} bytes, besides inputs"]

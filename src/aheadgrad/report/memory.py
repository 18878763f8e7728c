"""What a compiled call saves for its backward, why, what it computes again, and what a budget would change.

    report = compiled.memory()[0]
    print(report)

A frozen value: text prints it, and anything else may draw it.
"""

from __future__ import annotations

from dataclasses import dataclass

from aheadgrad.joint.level import Joint
from aheadgrad.partition.peak import peak_of_backward, peak_of_forward
from aheadgrad.partition.plan import curve
from aheadgrad.partition.saved import SavedValue, Split
from aheadgrad.partition.split import table_of
from aheadgrad.program.program import Program
from aheadgrad.program.show import type_text
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.replay import Replayed


@dataclass(frozen=True)
class SavedTensor:
    """`line` is the user's that made it; nothing for an input, which takes no memory of its own."""

    name: str
    type: str
    bytes: int
    is_input: bool
    line: str
    reason: str

    def __str__(self) -> str:
        told = ", ".join(filter(None, (self.type, f"{self.bytes} bytes", self.reason)))
        where = "an input" if self.is_input else self.line
        return f"{self.name}: {told}" + (f"  # {where}" if where else "")


@dataclass(frozen=True)
class ComputedAgain:
    name: str
    op: str
    line: str
    flops: int
    bytes_moved: int


@dataclass(frozen=True)
class AtBudget:
    budget: float
    bytes_saved: int
    flops_again: int


@dataclass(frozen=True)
class MemoryReport:
    """`bytes_saved` counts what the call makes, each memory once; `peak` is the most that forward or backward
    hold at a time, by simulation."""

    saved: tuple[SavedTensor, ...]
    sizes: tuple[str, ...]
    again: tuple[ComputedAgain, ...]
    bytes_saved: int
    peak: int
    curve: tuple[AtBudget, ...] = ()

    def __str__(self) -> str:
        lines = ["saved for backward:", *(f"  {s}" for s in self.saved)]
        lines += [f"  {name}: a size" for name in self.sizes]
        lines.append(f"  together {self.bytes_saved} bytes; at the peak about {self.peak}")
        if self.again:
            lines.append("computed again in backward:")
            for a in self.again:
                cost = f"{a.flops} operations" if a.flops else f"{a.bytes_moved} bytes read and written"
                lines.append(f"  {a.name} = {a.op}, {cost}" + (f"  # {a.line}" if a.line else ""))
        if self.curve:
            lines.append("with memory_budget=:")
            for c in self.curve:
                lines.append(f"  {c.budget:.2f}: {c.bytes_saved} bytes, {c.flops_again} operations again")
        return "\n".join(lines)


def memory_report(joint: Joint, split: Split, *, budgets: tuple[float, ...] = ()) -> MemoryReport:
    tensors = split.all_saved.tensors
    saved = tuple(
        SavedTensor(
            s.name, type_text(s.value), s.value.type.bytes, s.value.op is None, _line(joint, s), s.reason
        )
        for s in tensors
    )
    made = {joint.tape.view_source(s.value): None for s in tensors}
    own = [v for v in made if v.op is not None]
    backwards = [p for p in split.backwards if p is not None]
    peaks = [peak_of_forward(split.forward), *(peak_of_backward(p, _made(p)) for p in backwards)]
    return MemoryReport(
        saved,
        tuple(name for name, _ in split.all_saved.sizes),
        tuple(_again(joint, split)),
        sum(v.type.bytes for v in own),
        max(peaks),
        tuple(AtBudget(*point) for point in _curve(joint, budgets)),
    )


def _made(program: Program) -> list[Value]:
    """The inputs of a backward that take memory."""
    values = [p.value for p in program.inputs if type(p.value) is Value]
    return [v for v in values if v.op is not None]


def _line(joint: Joint, saved: SavedValue) -> str:
    op = joint.tape.of(saved.value)
    return "" if op is None or op.origin is None else str(op.origin)


def _again(joint: Joint, split: Split) -> list[ComputedAgain]:
    """Ops that both halves run, but for views."""
    ahead = {v for op in split.forward.ops for v in op.values}
    tables = [table_of(joint, g) for g in joint.gradients if g is not None]
    found: dict[Value, ComputedAgain] = {}
    for program in split.backwards:
        for op in program.ops if program is not None else ():
            value = next(op.values, None)
            if value is None or value not in ahead or op.viewed is not None or value.op is None:
                continue
            found.setdefault(value, _row(op, tables[0].flops(value.op), value))
    return list(found.values())


def _row(op: Op, flops: int, value: Value) -> ComputedAgain:
    target = op.target.op if isinstance(op.target, Replayed) else op.target
    moved = sum(v.type.bytes for v in (*op.uses, *op.values))
    return ComputedAgain(value.name, str(target), str(op.origin or ""), flops, moved)


def _curve(joint: Joint, budgets: tuple[float, ...]) -> list[tuple[float, int, int]]:
    """Bytes saved and arithmetic repeated, for all components together, at several budgets."""
    tables = [table_of(joint, g) for g in joint.gradients if g is not None]
    curves = [curve(table, budgets) for table in tables]
    return [(b, sum(c[k][0] for c in curves), sum(c[k][1] for c in curves)) for k, b in enumerate(budgets)]

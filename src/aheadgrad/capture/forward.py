"""The one run of the user's function.

    forward = run(session, call)
    forward.outputs        # the flat outputs as the trace sees them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from aheadgrad.capture.origins import origin_of_error
from aheadgrad.capture.session import Session
from aheadgrad.errors import AheadgradError, CaptureError, DataDependentError
from aheadgrad.program.slots import SharedBase, Slot
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import no_function_modes
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS


@dataclass(frozen=True, eq=False)
class SharedGroup:
    """Inputs in one storage that must enter as views of one base."""

    base: Tensor
    members: tuple[Tensor, ...]
    paths: tuple[str, ...]


@dataclass(eq=False)
class Call:
    """What is to be captured: a function of flat leaves.

    `inputs` are the tensors among the leaves and the lifted state, with their slots;
    `invoke` calls the user's function with a mapping from real tensors to what the trace sees.
    """

    inputs: list[tuple[Slot, Tensor]]
    invoke: Callable[[Callable[[Any], Any]], Any]
    numbers: list[tuple[Slot, Any]] = field(default_factory=list)
    shared: tuple[SharedGroup, ...] = ()


@dataclass(eq=False)
class Forward:
    session: Session
    outputs: list[Any]
    out_spec: Any
    grad_mode_after: bool
    grad_mode_before: bool
    number_slots: list[tuple[Slot, Any]]


def run(session: Session, call: Call) -> Forward:
    """Runs the function once and leaves everything that was seen in the session."""
    before = torch.is_grad_enabled()
    with session.running():
        with no_function_modes():
            seen_by_real = _enter_inputs(session, call)

        def see(value: Any) -> Any:
            return seen_by_real.get(id(value), value) if isinstance(value, Tensor) else value

        try:
            result = call.invoke(see)
        except Exception as error:
            raise _explained(error) from error
        after = torch.is_grad_enabled()
        flat, spec = pytree.tree_flatten(result, is_leaf=lambda v: isinstance(v, torch.Size))
        flat = [
            session.lift(v) if isinstance(v, Tensor) and not functional.is_wrapped(v) else v for v in flat
        ]
        with no_function_modes(), torch.no_grad():
            _sync_all(session, flat)
    return Forward(session, flat, spec, after, before, call.numbers)


def _enter_inputs(session: Session, call: Call) -> dict[int, Tensor]:
    seen: dict[int, Tensor] = {}
    grouped = {id(m): group for group in call.shared for m in group.members}
    for slot, real in call.inputs:
        if id(real) in seen:
            continue
        group = grouped.get(id(real))
        if group is None:
            seen[id(real)] = session.enter(slot, real, symbolic_name=_symbolic(session, slot)).seen
        else:
            _enter_shared(session, group, seen)
    return seen


def _symbolic(session: Session, slot: Slot) -> str:
    from aheadgrad.program.slots import UserInput

    return f"L_{slot.path}_" if session.symbolic and isinstance(slot, UserInput) else ""


def _enter_shared(session: Session, group: SharedGroup, seen: dict[int, Tensor]) -> None:
    """One entrance for the base; each member is a view of it."""
    base = session.enter(SharedBase(group.paths), group.base).seen
    for member in group.members:
        if member is group.base:
            seen[id(member)] = base
            continue
        with torch.enable_grad():
            view = base.as_strided(member.size(), member.stride(), member.storage_offset())
        seen[id(member)] = view
        session.members.append((member, view, functional.version_of(view)))


def _sync_all(session: Session, flat: list[Any]) -> None:
    for entrance in session.entrances:
        functional.sync(entrance.seen)
    for _, shadow in session.shadows:
        functional.sync(shadow)
    for value in flat:
        if isinstance(value, Tensor):
            session.layouts.settle(value)
            functional.sync(value)


def _explained(error: Exception) -> Exception:
    """The same error for the user's own mistakes; one of ours when the capture is at fault."""
    origin = origin_of_error(error)
    where = f"\n  at {origin.file}:{origin.line}, in {origin.function}" if origin else ""
    if isinstance(error, DATA_DEPENDENT_ERRORS) or (
        isinstance(error, DataDependentError) and "\n  at " not in str(error)
    ):
        what = str(error) if isinstance(error, DataDependentError) else _first_line(error)
        return DataDependentError(
            f"The function needs the value of a tensor to decide what to do: {what}.{where}\n"
            "While a function is recorded its tensors have no values. Instead:\n"
            "  1. choose with tensor operations: torch.where(condition, a, b);\n"
            "  2. pass the number as a Python argument (a new value compiles a new entry);\n"
            '  3. use torch.compile(fn, backend="aheadgrad"), which compiles around such a line.'
        )
    if isinstance(error, AheadgradError):
        return error
    if isinstance(error, NotImplementedError) or "FunctionalTensorWrapper" in str(error):
        return CaptureError(f"The function cannot be recorded: {_first_line(error)}.{where}")
    return error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__

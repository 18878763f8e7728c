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

from aheadgrad.errors import AheadgradError, CaptureError, DataDependentError, FallbackError
from aheadgrad.program.slots import Slot
from aheadgrad.recording.known_values import ValueNeeded
from aheadgrad.recording.limits import no_wrapper
from aheadgrad.recording.refusals import raised_before
from aheadgrad.recording.session import Session
from aheadgrad.recording.shared_entrances import enter_shared
from aheadgrad.recording.told_by_name import FOREIGN_TENSORS, NOT_ALLOCATED, NOT_RECORDED, SAYS
from aheadgrad.report.origins import origin_of_error, raised_by_torch
from aheadgrad.torchlayer import functional, random
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import no_function_modes
from aheadgrad.torchlayer.distributed import noticing_wrappers
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS, GuardOnDataDependentSymNode
from aheadgrad.torchlayer.kernels import is_refusal
from aheadgrad.torchlayer.subclasses import no_trace_in_globals


@dataclass(frozen=True, eq=False)
class SharedGroup:
    """Inputs in one storage that must enter as aliases of one owner.

    `roots` are the tensors that are no views: the owner first, then those that only share its
    storage; `counters` tells for each which version counter it has, 0 being the owner's. The owner
    is one of them, or (`made`) all of their memory, where no single one holds the others.
    """

    roots: tuple[Tensor, ...]
    counters: tuple[int, ...]
    members: tuple[Tensor, ...]
    slots: tuple[Slot, ...]
    made: bool = False


@dataclass(frozen=True, eq=False)
class Scalar:
    """A flat input that is no tensor; `after` tensors of the call come before it."""

    slot: Slot
    value: Any
    after: int


@dataclass(eq=False)
class Call:
    """What is to be captured: a function of flat leaves.

    `inputs` are the tensors among the leaves and the lifted state, with their slots;
    `invoke` calls the user's function with a mapping from real tensors to what the trace sees;
    `returns` writes the entry's return value from the tree spec and the flat outputs' names
    (without it, the entry returns the flat outputs in a list);
    `watched` if the function is Python of the user's, which may leave tensors anywhere;
    `whole` if it may call `backward()`, use `.grad` and read numbers, for callers who know what that means;
    `forward_only` if nobody wants gradients of the results.
    """

    inputs: list[tuple[Slot, Tensor]]
    invoke: Callable[[Callable[[Any], Any]], Any]
    shared: tuple[SharedGroup, ...] = ()
    returns: Callable[[Any, list[str], Any], str] | None = None
    scalars: tuple[Scalar, ...] = ()
    symbols: Symbols = field(default_factory=Symbols)
    generators: list[torch.Generator] | None = None  # those that existed before the call; None: not known
    watched: bool = False
    whole: bool = False
    forward_only: bool = False


@dataclass(eq=False)
class Forward:
    session: Session
    outputs: list[Any]
    out_spec: Any
    grad_mode_after: bool
    grad_mode_before: bool


def run(session: Session, call: Call) -> Forward:
    """Runs the function once and leaves everything that was seen in the session."""
    before = torch.is_grad_enabled()
    session.whole = call.whole
    with session.running():
        with no_function_modes():
            seen_by_real = _enter_inputs(session, call)

        def see(value: Any) -> Any:
            return seen_by_real.get(id(value), value) if isinstance(value, Tensor) else value

        if call.watched:
            session.handed.give(seen_by_real)
        with functional.outside():
            generator = torch.default_generator
            before_all = generator.get_state(), generator.initial_seed()
            known = call.generators
            session.generators = (
                None if known is None else [(g, g.get_state(), g.initial_seed()) for g in known]
            )
        try:
            with (
                random.noticing_changes() as set_inside,
                functional.noticing_set(session.limits.new_memory),
                noticing_wrappers(no_wrapper),
                no_trace_in_globals(),  # before anybody asks what the function has left behind
                session.recorder.running_users_code(),
                session.ambient.watching(),
            ):
                held = [call.invoke(see)]  # a list: frames that hold the result itself would be counted
        except Exception as error:
            told = _told(session, error)
            if told is error:
                raise
            raise told from error
        if session.refused is not None:  # the function caught it, and went on without a value
            raise explained(session.refused) from session.refused
        after = torch.is_grad_enabled()
        if call.watched and session.handed.left_behind(held):
            raise FallbackError("the function leaves a tensor somewhere, which a recording cannot repeat")
        with functional.outside():
            if set_inside or random.was_set(generator, *before_all):
                raise FallbackError("the random state is set inside the function")
        for known_generator, *_ in session.generators or ():
            session.check_generator(known_generator)
        flat, spec = pytree.tree_flatten(held.pop(), is_leaf=lambda v: isinstance(v, torch.Size))
        flat = [
            session.lift(v) if isinstance(v, Tensor) and not functional.is_wrapped(v) else v for v in flat
        ]
        with no_function_modes(), torch.no_grad():
            session.limits.results(flat)
            flat = [v if session.ledger.given(v) is not None else session.ledger.current(v) for v in flat]
            _sync_all(session, flat)
    session.open_sizes.check()
    session.open_sizes.check_memory(flat)
    return Forward(session, flat, spec, after, before)


def _told(session: Session, error: Exception) -> Exception:
    """What the function raised, or what eager would have raised, or why we cannot tell."""
    told = explained(error)
    if isinstance(told, AheadgradError):
        return told
    told = raised_before(session) or told
    if told is error and (session.trace.numbers or session.followed):
        return FallbackError(f"eager may take a size that values decide, where we raise: {error}")
    return told


def _enter_inputs(session: Session, call: Call) -> dict[int, Tensor]:
    seen: dict[int, Tensor] = {}
    grouped = {id(m): group for group in call.shared for m in group.members}
    for slot, real in call.inputs:
        if id(real) in seen:
            continue
        group = grouped.get(id(real))
        if group is None:
            seen[id(real)] = session.enter(slot, real).seen
        else:
            enter_shared(session, group, seen)
    return seen


def _sync_all(session: Session, flat: list[Any]) -> None:
    for entrance in session.entrances:
        functional.sync(entrance.seen)
        functional.sync(session.ledger.current(entrance.seen))
    if session.members:  # they address the owner's memory, so it has to look as it does in eager
        session.ledger.settle([entrance.seen for entrance in session.entrances])
    for member in session.members:
        functional.sync(session.ledger.current(member.seen))
    for entrance in session.entrances:
        if entrance.old_memory is not None:
            functional.sync(entrance.old_memory)
    session.trace.settled = len(session.trace.records)
    for value in flat:
        if isinstance(value, Tensor):
            session.ledger.of(value).result_geometry = session.ledger.geometry_in_eager(value)
    for value in flat:
        if isinstance(value, Tensor):
            session.settle(value)
            functional.sync(value)
    if session.veiled:  # what was laid out again shows in all who share the memory
        for entrance in session.entrances:
            functional.sync(entrance.seen)


def explained(error: Exception) -> Exception:
    """The same error for the user's own mistakes; one of ours when the capture is at fault."""
    origin = origin_of_error(error)
    where = f"\n  at {origin.place}" if origin else ""
    reads_memory = type(error) is RuntimeError and NOT_ALLOCATED in str(error)
    if reads_memory or isinstance(error, (ValueNeeded, *DATA_DEPENDENT_ERRORS)):
        what = str(error) if isinstance(error, ValueNeeded) else _first_line(error)
        if isinstance(error, GuardOnDataDependentSymNode):
            what = "a number or a size that values decide, as that of x[mask]"
        return DataDependentError(
            f"The function needs the value of a tensor to decide what to do: {what}.{where}\n"
            "While a function is recorded its tensors have no values. Instead:\n"
            "  1. choose with tensor operations: torch.where(condition, a, b);\n"
            "  2. pass the number as a Python argument (a new value compiles a new entry);\n"
            '  3. use frontend="dynamo" (the default), which compiles around such a line.'
        )
    if isinstance(error, AheadgradError):
        return error
    for text, reason in SAYS:
        if text in str(error):
            return FallbackError(reason)
    if isinstance(error, AssertionError) and str(error).startswith(FOREIGN_TENSORS):
        return FallbackError(
            "an nn.Parameter is made inside, or a function for a control-flow operator closes over a tensor"
        )
    missing = isinstance(error, NotImplementedError) and not is_refusal(error)
    if raised_by_torch(error) and (missing or NOT_RECORDED in str(error)):
        return CaptureError(f"The function cannot be recorded: {_first_line(error)}.{where}")
    return error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__

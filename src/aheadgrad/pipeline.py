"""The whole walk, in order. Every way in (compile, capture, compat, Dynamo) takes it.

record      ONE run of the function under functionalization; facts; gradients in the same trace
lower       the trace as values: a joint program, frozen facts
split       forward and backward programs, and what is saved between them
compile     executables
assemble    one generated function with everything around the call
rehearse    ops that eager would run and the program does not need are run once: they may raise

The same steps are taken again, from the recording that an entry keeps, when a backward comes along that it
was not compiled for (`Steps`): another pattern of tangents, the next order, other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from aheadgrad.backends.contract import Executable
from aheadgrad.backends.eager import compile_eager
from aheadgrad.backends.registry import Compiler, settled
from aheadgrad.cache.lookup import Lookup
from aheadgrad.cache.remembered import Remembered
from aheadgrad.conventions.whole_subclasses import backward_of_wholes
from aheadgrad.errors import (
    AheadgradError,
    CaptureError,
    FallbackError,
    HigherOrderError,
    InvalidProgram,
    NeedsNumbers,
)
from aheadgrad.joint.level import Component, Joint, Level
from aheadgrad.joint.requests import Door, Further, LooksAtValues, NeedsSizes, NoDoor, Request, Unusual
from aheadgrad.options import Options
from aheadgrad.partition.donated import donated
from aheadgrad.partition.next_order import split_next
from aheadgrad.partition.saved import SavedSet, Split
from aheadgrad.partition.split import backward_program, split
from aheadgrad.partition.wanted import program_of_wanted
from aheadgrad.program.expanded_tangents import serves
from aheadgrad.program.program import Program
from aheadgrad.program.slots import opened
from aheadgrad.program.values import Value
from aheadgrad.recording.door import LiveDoor
from aheadgrad.recording.forward import Call
from aheadgrad.recording.lower_levels import lower
from aheadgrad.recording.recording import Again, Plan, Recording, describe, first_plan, open_session, run_once
from aheadgrad.recording.veils import NeedsVeils
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.anomaly import looking_for_nan
from aheadgrad.runtime.backward import Failure, Run
from aheadgrad.runtime.by_sizes import BySizes, sizes_from
from aheadgrad.runtime.by_values import ByValues
from aheadgrad.runtime.entry import Entry, Executables, make_entry
from aheadgrad.runtime.links import Ways
from aheadgrad.runtime.next_node import make_step
from aheadgrad.runtime.padded import padded
from aheadgrad.runtime.rehearse import rehearse
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.collection import no_collection
from aheadgrad.torchlayer.letting_go import let_go_of_locals
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.subclasses import Form
from aheadgrad.torchlayer.wanted import Wanted


def run(call: Call, options: Options, lookup: Lookup | None = None) -> Entry:
    """From a call to a compiled entry; `lookup` if there is a cache."""
    journal = Journal()
    options = settled(options, device_of(call))
    with RECORDING:
        if lookup is not None:
            with no_collection():
                with journal.stage("cache"):
                    found = lookup.find(options)
                if found is not None:
                    return _entry(found.recording, found.joint, options, journal, found.split, found.door)
        with no_collection(), nullcontext() if lookup is None else lookup.watching():
            recording, joint = record(call, options, journal)
        try:
            return compiled(recording, joint, options, journal, lookup)
        except BaseException as error:
            recording.release()
            let_go_of_locals(error)
            raise


def device_of(call: Call) -> str:
    """The kind of device that a call is about."""
    kinds = {t.device.type for _, t in call.inputs}
    return next(iter(kinds - {"cpu"}), "cpu")


def compiled(
    recording: Recording, joint: Joint, options: Options, journal: Journal, lookup: Lookup | None = None
) -> Entry:
    """From a recording to a compiled entry."""
    kept = None if lookup is None else lookup.same_program(recording, joint)
    if kept is None:
        with journal.stage("split"), no_collection():
            parts = split(joint, recording.session.mode)
    else:
        joint, parts = kept
    entry = _entry(recording, joint, options, journal, parts, LiveDoor(recording))
    with journal.stage("rehearse"):
        rehearse(joint, [e.real for e in recording.session.entrances])
    if lookup is not None:
        with journal.stage("cache"):
            lookup.keep(recording, joint, parts)
    return entry


def _entry(
    recording: Recording | Remembered,
    joint: Joint,
    options: Options,
    journal: Journal,
    parts: Split,
    door: Door,
) -> Entry:
    with journal.stage("compile"):
        compiler = Compiler(options, recording.session.mode, journal)
        executables = _compile(joint, parts, compiler)
    with journal.stage("assemble"):
        steps = Steps(joint, door, compiler)
        spec, write = recording.forward.out_spec, recording.call.returns
        returns = None if write is None else lambda texts, names: write(spec, texts, names)
        return make_entry(joint, parts, executables, journal, steps, recording, returns)


def record(call: Call, options: Options, journal: Journal) -> tuple[Recording, Joint]:
    """Records a call, and lowers what was recorded. Tried again in another way where a run shows that it must
    be: with inputs merged that share memory, behind veils if a tensor subclass turns up."""
    plan = first_plan(call)
    with RECORDING:
        while True:
            try:
                return _attempt(plan, options, journal)
            except Again as again:
                plan = again.plan
            except NeedsVeils:
                plan = Plan(call, veiled=True)
            except NeedsNumbers as error:
                if call.symbols.optional:
                    raise  # the front end has other symbols to try
                if call.symbols.are_left():
                    call.symbols.become_numbers()
                    plan = first_plan(call)
                    continue
                if call.whole:
                    raise CaptureError(
                        "The function computes with a number that it reads off a tensor in a way that a "
                        f"program cannot repeat exactly: {error}. Compute with tensors instead."
                    ) from error
                raise FallbackError(f"a size that values decide is no plain number: {error}") from error


def _attempt(plan: Plan, options: Options, journal: Journal) -> tuple[Recording, Joint]:
    session = open_session(plan, options)
    try:
        with journal.stage("forward"):
            forward = run_once(plan, session)
        with journal.stage("facts"):
            recording = describe(plan, forward, options)
        with journal.stage("joint"):
            recording.differentiate()
        with journal.stage("lower"):
            return recording, lower(recording)
    except BaseException as error:
        session.forget_arguments()  # its parts hold each other
        let_go_of_locals(error)
        raise


def _compile(joint: Joint, parts: Split, compiler: Compiler) -> Executables:
    forward = compiler.compile(parts.forward)
    free = donated(joint, parts)
    backwards = [None if p is None else compiler.compile(p, free) for p in parts.backwards]
    return Executables(forward, tuple(backwards))


class Steps:
    """The walk from a level's recording on: record, split, compile, assemble. `seen` are values of lower
    orders that others see, too."""

    def __init__(
        self, level: Level, door: Door, compiler: Compiler, seen: frozenset[Value] = frozenset()
    ) -> None:
        self.level = level
        self.door = door
        self.compiler = compiler
        self.seen = level.seen | seen

    def close(self) -> None:
        """Lets go of the recording."""
        self.door = NoDoor()
        self.compiler.mode = None

    def backward(
        self,
        component: Component,
        saved: SavedSet,
        usual: Executable | None,
        pattern: tuple[Any, ...],
        state: AutocastState | None,
        wanted: Wanted,
        *,
        checking: bool,
    ) -> tuple[Run, frozenset[int] | None]:
        """A backward for tangents of this pattern to the wanted gradients; with the positions of the saved
        tensors that it uses."""
        level = self.level
        asked, by_subclasses = _asked(level, pattern)
        used: list[frozenset[int]] = []
        if not (by_subclasses or checking or state is not None):
            known = self._known(component, saved, usual, asked, wanted)
            if known is not None:
                return known

        def make(further: Further) -> Run:
            try:
                program = backward_program(level, further.gradients, saved, further.tape, further.sizes)
            except InvalidProgram:
                if usual is None or not callable(level.options.partition) or level.has_symbols:
                    raise
                outputs = [level.exits[i] for i in component.exits]
                return padded(usual.call, outputs, component.expected, asked)
            if by_subclasses:
                return compile_eager(program, foreign=True).call
            used.extend(_used(level, program, saved))
            if checking:
                made = Executable(looking_for_nan(program, further.edges))
            else:
                made = self.compiler.compile(program)
            return backward_of_wholes(further.gradients, made, len(saved.values)).call

        request = Request(component.number, asked, state, edges=checking, wanted=wanted)
        return self._recorded(request, saved, make), used[0] if used else None

    def _known(
        self,
        component: Component,
        saved: SavedSet,
        usual: Executable | None,
        asked: tuple[Any, ...],
        wanted: Wanted,
    ) -> tuple[Run, frozenset[int] | None] | None:
        """The backward recorded ahead if it serves these tangents; or what wanted gradients need of it."""
        level, whole = self.level, self.level.gradients[component.number]
        if whole is None or usual is None or not whole.usual or callable(level.options.partition):
            return None
        if wanted is None:
            program: Program | None = backward_program(level, whole, saved)
        else:
            program = program_of_wanted(level, whole, saved, wanted)
        if program is None:
            return None
        if asked != component.expected and not all(kind is True for kind in asked):
            plain = self.compiler.backend is compile_eager  # others are made for certain strides
            if not plain or level.veiled or level.lays_out or not serves(program, asked):
                return None
        used = next(_used(level, program, saved), None)
        if wanted is None:
            return usual.call, used
        made = self.compiler.compile(program)
        return backward_of_wholes(whole.only(wanted), made, len(saved.values)).call, used

    def differentiable(
        self,
        component: Component,
        saved: SavedSet,
        ways: Ways,
        pattern: tuple[Any, ...],
        requiring: tuple[bool, ...],
        state: AutocastState | None,
        wanted: Wanted,
    ) -> Any:
        """A backward that can be differentiated: a `Step`, or what finds one."""
        fixed = self.level.fixed_autocast
        asked, by_subclasses = _asked(self.level, pattern)
        compiler = self.compiler
        if by_subclasses:
            plainly = replace(self.level.options, backend="eager")
            compiler = Compiler(plainly, compiler.mode, compiler.journal, foreign=True)

        def make(further: Further) -> Any:
            level, door = further.level, further.door
            assert level is not None
            assert door is not None
            parts = split_next(level, saved, self.seen)
            more = len(parts.program.results) - len(opened((e.slot, e.value) for e in level.leaving))
            program = compiler.compile(parts.program)
            program = backward_of_wholes(level.recorded, program, len(saved.values), more)
            backwards = [
                None
                if g is None or not g.usual
                else backward_of_wholes(
                    g, compiler.compile(backward_program(level, g, kept)), len(kept.values)
                )
                for g, kept in zip(level.gradients, parts.saved, strict=True)
            ]
            under = self.level.backward_autocast if fixed else state
            steps = Steps(level, door, compiler, self.seen)
            return make_step(level, parts, program, backwards, saved, ways, under, steps)

        request = Request(component.number, asked, state, requiring, wanted=wanted)
        return self._recorded(request, saved, make)

    def handing(
        self,
        component: Component,
        saved: SavedSet,
        pattern: tuple[Any, ...],
        wanted: Wanted,
        handed: tuple[int, ...],
        *,
        hands: int,
    ) -> tuple[Program, tuple[tuple[int, int], ...]] | None:
        """A backward that takes what is handed to it and, if asked to, hands on; with its ends. None if there
        is no such backward: then each goes its own way."""
        request = Request(component.number, pattern, None, wanted=wanted, handed=handed, hands=hands)
        try:
            further = self.door.more(request)
            given = further.tape, further.sizes, further.handed
            program = backward_program(self.level, further.gradients, saved, *given)
        except Exception:
            return None
        return replace(program, unbatched=True), further.ends

    def executable(self, program: Program) -> Executable:
        """Compiles a program that is there already."""
        return self.compiler.compile(program)

    def _recorded(self, request: Request, saved: SavedSet, make: Callable[[Further], Any]) -> Any:
        """What `make` makes of a recording: for any sizes and values if possible; else for the sizes at hand
        (`BySizes`), or anew each time, for the values at hand (`ByValues`)."""
        try:
            further = self.door.more(request)
        except NeedsSizes:
            shapes = [*saved.values, *self._tangents(request)]

            def for_sizes(sizes: Any) -> Any:
                return self._recorded(replace(request, sizes=sizes), saved, make)

            return BySizes(shapes, for_sizes)
        except LooksAtValues as error:
            if request.values is not None:
                raise HigherOrderError(
                    f"{error}. What it looks at does not follow from the tensors that the call saved. "
                    "Differentiate the uncompiled function here."
                ) from error
            values, tangents = saved.values, self._tangents(request)

            def for_values(at_hand: list[Any]) -> Any:
                kept = at_hand[: len(values)]
                given = list(zip(values, kept, strict=True)), at_hand[len(values) :]
                sizes = sizes_from([*values, *tangents], at_hand)
                return self._recorded(replace(request, values=given, sizes=sizes), saved, make)

            return ByValues(for_values, str(error))
        except Exception as error:
            if request.requiring is not None and isinstance(error, AheadgradError):
                raise
            return Failure(error)
        return make(further)

    def _tangents(self, request: Request) -> list[Any]:
        """The sizes of the tangents of a request."""
        exits = self.level.components[request.component].exits
        asked = zip(exits, request.tangents, strict=True)
        return [self.level.exits[i].size for i, t in asked if t is not None]


def _used(level: Level, program: Program, saved: SavedSet) -> Iterator[frozenset[int]]:
    """The positions of the saved tensors that a backward uses, where that makes a difference."""
    if not level.lays_out:
        taken = {v for op in program.ops for v in op.uses}
        yield frozenset(k for k, s in enumerate(saved.tensors) if s.value in taken)


def _asked(level: Level, pattern: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """What to ask for, given a pattern of tangents; and whether some are of subclasses that the recording
    knows nothing of: then it is made for plain ones, and what its ops mean is up to those given."""
    if level.lays_out:
        asked = tuple(kind or None for kind in pattern)
        foreign = not level.veiled and any(isinstance(kind, Unusual) for kind in asked)
        return (tuple(kind and True for kind in asked) if foreign else asked), foreign
    foreign = not level.veiled and any(isinstance(p, Form) for p in pattern)
    return (tuple(p.stride if isinstance(p, Form) else p for p in pattern) if foreign else pattern), foreign

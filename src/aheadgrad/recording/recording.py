"""A recording: one run of the function, what was found about it, and its backwards, all still live.

`pipeline` takes the steps: `open_session`, `run_once`, `describe`, `Recording.differentiate`;
`lower_levels.lower` ends it. What stays alive behind an entry is reached through a `LiveDoor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor

from aheadgrad.errors import (
    AheadgradError,
    DataDependentError,
    FallbackError,
    NeedsNumbers,
    reason_of,
    without_frames,
)
from aheadgrad.facts.facts import Facts
from aheadgrad.joint import level as values
from aheadgrad.options import Options
from aheadgrad.program.slots import Slot, UserInput, UserOutput
from aheadgrad.recording.components import Component, Target
from aheadgrad.recording.exits import Exit, copies, grown_views, inner_leaves, kept_inside, make_exits
from aheadgrad.recording.forward import Call, Forward, Scalar, explained, run
from aheadgrad.recording.input_facts import input_facts, member_facts
from aheadgrad.recording.joint import Gradients, Joint
from aheadgrad.recording.lower_values import Lowering
from aheadgrad.recording.output_facts import Aliases, find_aliases
from aheadgrad.recording.session import Session
from aheadgrad.recording.shared_groups import check_bases, check_reshapes, merge_all, merge_shared
from aheadgrad.recording.views_of_views import taken_through
from aheadgrad.report.origins import raised_below_users_code
from aheadgrad.torchlayer.autocast import AutocastState, autocast_state, from_options
from aheadgrad.torchlayer.autograd import CreationMeta, creation_meta, is_view
from aheadgrad.torchlayer.dispatch import dispatch_modes
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS, mode_of, new_mode
from aheadgrad.torchlayer.subclasses import inside, is_plain, parts_of, values_of
from aheadgrad.torchlayer.symbols import is_symbolic, symbolic_numbers

_PIECES = 4  # a backward that computes again is not cut into more: a model may return what each layer makes


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call is to be recorded: with which of its inputs merged, and behind veils or not."""

    call: Call
    veiled: bool
    merged: bool = False


class Again(Exception):
    """A run has shown that the call is to be recorded in another way."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("to be recorded again")
        self.plan = plan


def first_plan(call: Call) -> Plan:
    return Plan(call, veiled=not all(is_plain(t) for _, t in call.inputs))


def run_once(plan: Plan, session: Session) -> Forward:
    """One run of the function. Raises `Again` if inputs that share memory turn out to be changed, or when it
    fails while some share memory: eager may refuse the very sharing, before it comes to that error."""
    call = plan.call
    try:
        forward = run(session, call)
    except AheadgradError:
        raise
    except DATA_DEPENDENT_ERRORS as error:  # which the user's code caught
        raise explained(error) from error  # type: ignore[arg-type]
    except Exception:
        merged = None if plan.merged else merge_all(call)
        if merged is None:
            raise
        raise Again(replace(plan, call=merged, merged=True)) from None
    if plan.merged:
        check_bases(session)
    check_reshapes(forward)
    merged = None if plan.merged else merge_shared(forward, call)
    if merged is not None:
        raise Again(replace(plan, call=merged, merged=True))
    session.recorder.ops.exact = False  # strides of gradients are nobody's promise
    return forward


@dataclass(eq=False)
class Recording:
    """Everything that one run of the function told us, and its backwards: the first level."""

    call: Call
    forward: Forward
    facts: Facts
    aliases: Aliases
    exits: list[Exit]
    in_graph_updates: frozenset[int]
    options: Options
    autocast: AutocastState | None
    backward_autocast: AutocastState | None
    fixed_autocast: bool
    gradients: list[Gradients | None] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    components: tuple[values.Component, ...] = ()  # as values, once it is lowered
    joint: Joint = field(init=False)
    lowering: Lowering = field(init=False)

    order = 0  # which derivatives the exits are
    fixed_sizes = None  # an entry is recorded with symbols, or without any

    @property
    def session(self) -> Session:
        return self.forward.session

    def differentiate(self) -> None:
        """Finds the components, and records the backward of each for the tangents that are expected."""
        session, options = self.session, self.options
        cut = 0 if callable(options.partition) or session.hooked else options.pieces
        if options.partition == "min_cut":
            cut = min(cut, _PIECES)
        views = grown_views(self.facts, self.forward.outputs, self.exits) if cut else []
        targets = _targets(self.forward, self.facts, self.aliases)
        self.joint = Joint(session, self.exits, targets, one_node=options.one_node, cut=cut, views=views)
        copied: list[tuple[Tensor, Any]] = []
        if options.one_node and self.joint.components:
            copied = copies(session, self.facts, self.in_graph_updates)
        self.lowering = Lowering(session.trace, parts_first=options.one_node, copies=copied)
        for number, component in enumerate(self.joint.components):
            self.gradients.append(record_expected(self, number, component))
        if self.failures and (self.call.symbols.optional or self.call.symbols.are_left()):
            raise NeedsNumbers("a derivative that fails with symbols may be fine with numbers")

    def slot_of(self, target: Target) -> Slot:
        if target.kind == "input":
            return self.session.entrances[target.index].slot
        if target.kind == "inside":
            return UserInput(target.name)
        if target.kind == "member":
            return self.session.members[target.index].slot
        if target.kind == "exit":
            return self.joint.exits[target.index].slot
        return UserOutput(target.index)

    @cached_property
    def scalars(self) -> list[tuple[int, Scalar]]:
        """Inputs that are no tensors: symbolic numbers and, in the drop-in's graphs, constants; each with
        the number of entrances that were given before it."""
        found = []
        for scalar in self.call.scalars:
            if self.options.one_node or is_symbolic(scalar.value):
                before = {id(t) for _, t in self.call.inputs[: scalar.after]}
                before |= {id(m.owner) for m in self.session.members if id(m.real) in before}
                found.append((sum(id(e.real) in before for e in self.session.entrances), scalar))
        return found

    @property
    def numbers(self) -> list[Any]:
        """The symbolic numbers, which the entry takes after its tensors."""
        return [s.value for s in self.call.scalars if is_symbolic(s.value)]

    @cached_property
    def has_symbols(self) -> bool:
        return bool(self.numbers or self.symbolic_inputs() or self.session.trace.numbers)

    @property
    def depends_on_offsets(self) -> bool:
        """Does it matter where in their memory inputs lie?"""
        if self.session.reads_offsets or self.session.members or any(f.geometry for f in self.facts.inputs):
            return True
        made = (*self.facts.outputs, *self.facts.roots)
        if any(getattr(getattr(f, "recipe", None), "geometry", None) for f in made):
            return True
        restride = torch.ops.aten.as_strided.default
        return any(r.target is restride for r in self.session.trace.records)

    def symbolic_inputs(self) -> dict[int, Any]:
        """By id of the tensor given: the traced values of inputs with symbolic sizes."""
        found: dict[int, Any] = {}
        for e in self.session.entrances:
            for real, value in zip(parts_of(e.real), values_of(e.value), strict=True):
                if symbolic_numbers(value):
                    found[id(real)] = value
        return found

    def release(self) -> None:
        """Lets go of the arguments of the call that was captured; the trace does not need them."""
        self.call.inputs, self.call.shared = [], ()
        self.call.symbols = Symbols()
        self.session.fakes = {}
        self.call.invoke = _gone
        self.session.forget_arguments()


def _gone(see: Any) -> Any:
    raise AssertionError("this call was captured and let go")


def describe(plan: Plan, forward: Forward, options: Options) -> Recording:
    """What happened to inputs, what outputs share memory with, and what leaves the program."""
    ambient = autocast_state()
    session = forward.session
    with session.recording():
        inputs = [input_facts(session, i, e) for i, e in enumerate(session.entrances)]
        inputs += [member_facts(session, k, m) for k, m in enumerate(session.members)]
        aliases = find_aliases(forward)
        changed = forward.grad_mode_after != forward.grad_mode_before
        after = forward.grad_mode_after if changed else None
        outputs = taken_through(aliases.outputs, forward.outputs)
        facts = Facts(tuple(inputs), tuple(outputs), tuple(aliases.roots), after)
        kept = kept_inside(
            session, facts, keep=options.keep_inference_input_mutations, any_input=options.one_node
        )
        exits = make_exits(forward, facts, aliases, kept)
        if plan.call.forward_only:
            exits = [replace(e, differentiable=False) for e in exits]
    fixed, state = from_options(options.backward_autocast, ambient)
    return Recording(plan.call, forward, facts, aliases, exits, kept, options, ambient, state, fixed)


def _fix_sizes(call: Call) -> None:
    """Inputs that enter as views of one base have sizes and offsets that are plain numbers."""
    sizes = [n for fake in call.symbols.fakes.values() for _, _, n in symbolic_numbers(fake)]
    for number in [*sizes, *(s.value for s in call.scalars)]:
        if isinstance(number, SymInt):
            int(number)


def open_session(plan: Plan, options: Options) -> Session:
    call, veiled = plan.call, plan.veiled
    if plan.merged:
        _fix_sizes(call)
    if veiled and dispatch_modes():
        raise FallbackError("a dispatch mode is active around a call with tensor subclasses")
    reals = [t for _, t in call.inputs]
    mode = call.symbols.mode or mode_of(reals)
    if mode is None:
        return Session(new_mode(dynamic=False), options.decompositions, veiled=veiled)
    session = Session(mode, options.decompositions, veiled=veiled)
    session.recorder.ops.exact = session.plain_numbers = call.symbols.optional
    session.fakes = call.symbols.fakes
    session.items = call.symbols.items
    session.sized = bool(
        session.fakes
        or session.items
        or any(is_symbolic(s.value) for s in call.scalars)
        or any(map(symbolic_numbers, reals))
    )
    return session


def _targets(forward: Forward, facts: Facts, aliases: Aliases) -> list[Target]:
    """What gradients are taken of: inputs that require grad, and leaves made inside."""
    targets = [
        Target("input", i, e.leaf) for i, e in enumerate(forward.session.entrances) if e.leaf.requires_grad
    ]
    tracked = any(f.history_changed or f.history_dropped for f in facts.inputs)
    reshaped = {f.index for f in facts.inputs if f.geometry is not None}
    tracked |= any(index >= 0 for index in reshaped)
    written = any(f.version_bumps for f in facts.inputs)
    for k, m in enumerate(forward.session.members):
        if m.leaf is not None and m.leaf.requires_grad:
            targets.append(Target("inside", k, m.leaf, f"m{k}"))
        elif (
            not tracked
            and -1 - k not in reshaped
            and all(_has_history(view, written=written) for view in (m.seen, m.real))
        ):
            targets.append(Target("member", k, m.seen, f"m{k}"))  # a view of another input
    for i, e in enumerate(forward.session.entrances):
        for name, inner in inside(e.seen, f"p{i}") if e.form is not None else ():
            if inner.requires_grad:
                targets.append(Target("inside", i, inner, name))
    for kind, index, tensor in inner_leaves(facts, aliases, forward.outputs):
        targets.append(Target(kind, index, tensor))
    return targets


def _has_history(view: Tensor, *, written: bool) -> bool:
    """Has it a history that may be asked for? Where its memory was written to, that is made anew, but not of
    parts of `split`."""
    if not is_view(view):
        return False
    part = creation_meta(view) == CreationMeta.MULTI_OUTPUT_NODE and not written
    return (part or creation_meta(view) == CreationMeta.DEFAULT) and view.grad_fn is not None


def record_expected(captured: Any, number: int, component: Component) -> Gradients | None:
    """The backward with all tangents; if eager would raise there, with those that can be had."""
    state = captured.backward_autocast
    expected = captured.joint.expected_pattern(component)
    try:
        return captured.joint.record(component, expected, state)
    except Exception as error:
        ours = explained(error)
        for_later = isinstance(error, NotImplementedError) or isinstance(ours, DataDependentError)
        if isinstance(ours, AheadgradError) and not (captured.order and for_later):
            raise ours from error
        if not captured.order and raised_below_users_code(error):  # because of the recording? eager will tell
            raise FallbackError(f"a backward cannot be recorded: {reason_of(error)}") from error
        # from the second order on, also what nobody wrote, or decides by values
        captured.failures[number] = without_frames(error)
    several = len(component.exits) > 1
    if captured.order and not several:
        return None

    def with_tangents(there: tuple[bool, ...]) -> Gradients | None:
        some = tuple(layout if given else None for layout, given in zip(expected, there, strict=True))
        return _attempt(lambda: captured.joint.record(component, some, state))

    def to_targets(wanted: tuple[bool, ...]) -> Gradients | None:
        return _attempt(lambda: captured.joint.record(component, expected, state, None, wanted))

    found = _most(with_tangents, len(component.exits)) if several else None
    return found or _most(to_targets, len(component.targets))


def _most(attempt: Callable[[tuple[bool, ...]], Gradients | None], count: int) -> Gradients | None:
    """What can be had with all of those that can be had alone."""
    working = tuple(attempt(tuple(i == k for i in range(count))) is not None for k in range(count))
    return attempt(working) if any(working) else None


def _attempt(record: Callable[[], Gradients]) -> Gradients | None:
    try:
        return record()
    except Exception:
        return None

"""The capture stage: from a call to forward, facts and gradients in one trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import SymInt, Tensor, fx

from aheadgrad.conventions import in_graph
from aheadgrad.errors import AheadgradError, DataDependentError, FallbackError, NeedsNumbers, reason_of
from aheadgrad.facts.facts import Facts
from aheadgrad.options import Options
from aheadgrad.partition.split import primal_ports
from aheadgrad.program.opened import opened
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Gradient, NoGradient, Signature, Slot, Tangent, UserInput, UserOutput
from aheadgrad.recording.collect import collect
from aheadgrad.recording.components import Component, Target
from aheadgrad.recording.cut import Cutter
from aheadgrad.recording.exits import Exit, grown_views, inner_leaves, make_exits
from aheadgrad.recording.forward import Call, Forward, Scalar, explained, run
from aheadgrad.recording.joint import Gradients, Joint, Pattern
from aheadgrad.recording.origins import raised_below_users_code
from aheadgrad.recording.output_facts import Aliases
from aheadgrad.recording.ports import Port
from aheadgrad.recording.session import Session
from aheadgrad.recording.sharing import check_bases, check_reshapes, merge_all, merge_shared
from aheadgrad.recording.veils import NeedsVeils
from aheadgrad.report.journal import Journal
from aheadgrad.report.text import explain_captured
from aheadgrad.torchlayer.autocast import AutocastState, autocast_as, autocast_state, from_options
from aheadgrad.torchlayer.dispatch import dispatch_modes
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS, mode_of, new_mode
from aheadgrad.torchlayer.subclasses import inside, is_plain, parts_of, values_of
from aheadgrad.torchlayer.symbols import is_symbolic, places


@dataclass(eq=False)
class Captured:
    """Everything that one run of the function told us; printable."""

    call: Call
    forward: Forward
    facts: Facts
    aliases: Aliases
    exits: list[Exit]
    joint: Joint
    gradients: list[Gradients | None]
    failures: dict[int, Exception]
    autocast: AutocastState | None
    backward_autocast: AutocastState | None
    fixed_autocast: bool
    journal: Journal
    in_graph_updates: frozenset[int]
    options: Options
    cutter: Cutter = field(init=False)
    _places: dict[int, int] = field(default_factory=dict)  # by id of a scalar, once the arguments are gone

    def __post_init__(self) -> None:
        copied: list[tuple[Tensor, Any]] = []
        if self.options.one_node and self.joint.components:
            copied = in_graph.copies(self.session, self.facts, self.in_graph_updates)
        self.cutter = Cutter(
            self.session.trace, copied, sized=self.session.sized, parts_first=self.options.one_node
        )

    @property
    def session(self) -> Session:
        return self.forward.session

    @property
    def order(self) -> int:
        """Which derivatives the exits are."""
        return 0

    @property
    def one_node(self) -> bool:
        return self.options.one_node

    @property
    def fixed_sizes(self) -> None:
        """An entry is recorded with symbols, or without any."""
        return None

    @property
    def differentiable_again(self) -> bool:
        """Are derivatives beyond the first to be had?"""
        return self.options.any_order and not self.session.veiled

    @property
    def graph(self) -> fx.Graph:
        return self.program.graph

    @property
    def signature(self) -> Signature:
        return self.program.signature

    def release(self) -> None:
        """Lets go of the arguments of the call that was captured; the trace does not need them."""
        if self.has_symbols and self.session.items:
            return
        self._places = {id(scalar): self._place(scalar) for scalar in self.scalars}
        self.call.inputs = []
        self.call.symbols = Symbols()
        self.session.fakes = {}
        self.call.invoke = _gone
        self.session.forget_arguments()

    def explain(self) -> str:
        """The joint program, what was found about inputs and outputs, the time of each stage."""
        return explain_captured(self)

    def __str__(self) -> str:
        return str(self.program)

    @property
    def inputs(self) -> list[tuple[Slot, Any]]:
        """Slots and traced values of all program inputs, numbers where they were given."""
        return opened(self.wholes)

    @property
    def wholes(self) -> list[tuple[Slot, Any]]:
        """The same, with tensor subclasses as the caller gives them."""
        found: list[tuple[Slot, Any]] = [(e.slot, e.value) for e in self.session.entrances]
        for scalar in reversed(self.scalars):
            found.insert(self._place(scalar), (scalar.slot, scalar.value))
        return found

    @property
    def scalars(self) -> list[Scalar]:
        """Inputs that are no tensors: symbolic numbers and, in the drop-in's graphs, constants."""
        return [s for s in self.call.scalars if self.options.one_node or is_symbolic(s.value)]

    @property
    def numbers(self) -> list[Any]:
        """The symbolic numbers, which the entry takes after its tensors."""
        return [s.value for s in self.call.scalars if is_symbolic(s.value)]

    @cached_property
    def has_symbols(self) -> bool:
        return bool(self.numbers or self.symbolic_inputs() or self.session.trace.numbers)

    def symbolic_inputs(self) -> dict[int, Any]:
        """By id of the tensor given: the traced values of inputs with symbolic sizes."""
        found: dict[int, Any] = {}
        for e in self.session.entrances:
            for real, value in zip(parts_of(e.real), values_of(e.value), strict=True):
                if places(value):
                    found[id(real)] = value
        return found

    def _place(self, scalar: Scalar) -> int:
        """How many of the session's entrances were given before this number."""
        if id(scalar) in self._places:
            return self._places[id(scalar)]
        before = {id(t) for _, t in self.call.inputs[: scalar.after]}
        before |= {id(m.owner) for m in self.session.members if id(m.real) in before}
        return sum(id(e.real) in before for e in self.session.entrances)

    def slot_of(self, target: Target) -> Slot:
        if target.kind == "input":
            return self.session.entrances[target.index].slot
        if target.kind == "inside":
            return UserInput(target.name)
        if target.kind == "exit":
            return self.joint.exits[target.index].slot
        return UserOutput(target.index)

    def gradient_outputs(self, g: Gradients) -> list[tuple[Slot, Any]]:
        """What a backward returns: the targets' gradients; in the drop-in's graphs, one per input."""
        grads = zip(g.component.targets, g.grads, strict=True)
        found: list[tuple[Slot, Any]] = [(Gradient(self.slot_of(t)), grad) for t, grad in grads]
        if not self.options.one_node:
            return found
        by_input = {t.index: k for k, t in enumerate(g.component.targets) if t.kind == "input"}
        entrance = {id(e.value): i for i, e in enumerate(self.session.entrances)}
        each: list[tuple[Slot, Any]] = []
        if self.session.veiled:
            return found
        for slot, value in self.inputs:
            k = by_input.get(entrance.get(id(value), -1))
            each.append((NoGradient(slot), None) if k is None else found[k])
        return each + [f for t, f in zip(g.component.targets, found, strict=True) if t.kind != "input"]

    @cached_property
    def program(self) -> Program:
        """The joint program: `(primals, tangents) -> (outputs, gradients)`."""
        ports = primal_ports(self.inputs)
        outputs = opened(in_graph.results(self, inference=False))
        phases = {"forward"}
        number = 0
        for g in self.gradients:
            if g is None:
                continue
            phases.add(g.phase)
            for i, tangent in zip(g.component.exits, g.tangents, strict=True):
                if tangent is not None:
                    for slot, value in opened([(Tangent(self.joint.exits[i].slot), tangent)]):
                        number += 1
                        ports.append(Port(slot, value, f"tangents_{number}"))
            outputs += opened(self.gradient_outputs(g))
        return self.cutter.cut("joint", ports, outputs, phases, in_graph.writes(self))

    def record(
        self,
        component: Component,
        pattern: Pattern,
        state: AutocastState | None,
        requiring: tuple[bool, ...] | None = None,
    ) -> Gradients:
        return self.joint.record(component, pattern, lambda: autocast_as(state), requiring)


def _gone(see: Any) -> Any:
    raise AssertionError("this call was captured and let go")


def capture_call(call: Call, options: Options, journal: Journal) -> Captured:
    """Captures a call; once more, with veils, if a tensor subclass turns up that is not an input."""
    veiled = not all(is_plain(t) for _, t in call.inputs)
    try:
        try:
            return _capture(call, options, journal, veiled)
        except NeedsVeils:
            return _capture(call, options, journal, veiled=True)
    except NeedsNumbers as error:
        if call.symbols.optional:
            raise
        raise FallbackError(f"a size that values decide is no plain number: {error}") from error


def _capture(call: Call, options: Options, journal: Journal, veiled: bool) -> Captured:
    ambient = autocast_state()
    with journal.stage("forward"):
        forward = _run_forward(call, options, veiled)
        forward.session.recorder.ops.exact = False  # strides of gradients are nobody's promise
    with journal.stage("facts"), forward.session.recording():
        facts, aliases = collect(forward)
        kept = in_graph.kept_inside(forward.session, facts, keep=options.keep_inference_input_mutations)
        exits = make_exits(forward, facts, aliases, kept)
    with journal.stage("joint"):
        targets = _targets(forward, facts, aliases)
        cut = options.partition == "default" and not forward.session.hooked
        views = grown_views(facts, forward.outputs) if cut else []
        joint = Joint(forward.session, exits, targets, one_node=options.one_node, cut=cut, views=views)
        fixed, state = from_options(options.backward_autocast, ambient)
        captured = Captured(
            call, forward, facts, aliases, exits, joint, [], {}, ambient, state, fixed, journal, kept, options
        )
        for number, component in enumerate(joint.components):
            captured.gradients.append(record_expected(captured, number, component))
        if captured.failures and call.symbols.optional:
            raise NeedsNumbers("a derivative that fails with symbols may be fine with numbers")
    return captured


def _run_forward(call: Call, options: Options, veiled: bool) -> Forward:
    """One run; a second one only when inputs that share memory turn out to be changed.

    Or when the first one fails: eager may refuse the very sharing, before it comes to that error.
    """
    try:
        forward = run(_open(call, options, veiled), call)
    except AheadgradError:
        raise
    except DATA_DEPENDENT_ERRORS as error:  # which the user's code caught
        raise explained(error) from error  # type: ignore[arg-type]
    except Exception:
        merged = merge_all(call)
        if merged is None:
            raise
    else:
        check_reshapes(forward)
        merged = merge_shared(forward, call)
    if merged is None:
        return forward
    _fix_sizes(merged)
    forward = run(_open(merged, options, veiled), merged)
    check_bases(forward.session)
    check_reshapes(forward)
    return forward


def _fix_sizes(call: Call) -> None:
    """Inputs that enter as views of one base have sizes and offsets that are plain numbers."""
    sizes = [n for fake in call.symbols.fakes.values() for _, _, n in places(fake)]
    for number in [*sizes, *(s.value for s in call.scalars)]:
        if isinstance(number, SymInt):
            int(number)


def _open(call: Call, options: Options, veiled: bool) -> Session:
    if veiled and dispatch_modes():
        raise FallbackError("a dispatch mode is active around a call with tensor subclasses")
    reals = [t for _, t in call.inputs]
    mode = call.symbols.mode or mode_of(reals)
    if mode is None:
        mode = new_mode(dynamic=bool(options.dynamic))
        return Session(mode, options.decompositions, symbolic=bool(options.dynamic), veiled=veiled)
    session = Session(mode, options.decompositions, veiled=veiled)
    session.recorder.ops.exact = session.plain_numbers = call.symbols.optional
    session.fakes = call.symbols.fakes
    session.items = call.symbols.items
    session.sized = bool(
        session.fakes
        or session.items
        or any(is_symbolic(s.value) for s in call.scalars)
        or any(map(places, reals))
    )
    return session


def _targets(forward: Forward, facts: Facts, aliases: Aliases) -> list[Target]:
    """What gradients are taken of: inputs that require grad, and leaves made inside."""
    targets = [
        Target("input", i, e.leaf)
        for i, e in enumerate(forward.session.entrances)
        if e.leaf.requires_grad and _differentiable(e.leaf)
    ]
    for k, m in enumerate(forward.session.members):
        if m.leaf is not None and m.leaf.requires_grad:
            targets.append(Target("inside", k, m.leaf, f"m{k}"))
    for i, e in enumerate(forward.session.entrances):
        for name, inner in inside(e.seen, f"p{i}") if e.form is not None else ():
            if inner.requires_grad and _differentiable(inner):
                targets.append(Target("inside", i, inner, name))
    for kind, index, tensor in inner_leaves(forward.session, facts, aliases, forward.outputs):
        targets.append(Target(kind, index, tensor))
    return targets


def _differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def record_expected(captured: Any, number: int, component: Component) -> Gradients | None:
    """The backward with all tangents; if eager would raise there, with those that can be had."""
    state = captured.backward_autocast
    expected = captured.joint.expected_pattern(component)
    try:
        return captured.record(component, expected, state)
    except Exception as error:
        ours = explained(error)
        for_later = isinstance(error, NotImplementedError) or isinstance(ours, DataDependentError)
        if isinstance(ours, AheadgradError) and not (captured.order and for_later):
            raise ours from error
        if not captured.order and raised_below_users_code(error):  # because of the recording? eager will tell
            raise FallbackError(f"a backward cannot be recorded: {reason_of(error)}") from error
        captured.failures[number] = (
            error  # from the second order on, also what nobody wrote, or decides by values
        )
    if len(component.exits) == 1:
        return None
    working = []
    for k in range(len(component.exits)):
        alone = tuple(layout if i == k else None for i, layout in enumerate(expected))
        try:
            captured.record(component, alone, state)
        except Exception:
            continue
        working.append(k)
    if not working:
        return None
    some = tuple(layout if i in working else None for i, layout in enumerate(expected))
    try:
        return captured.record(component, some, state)
    except Exception:
        return None

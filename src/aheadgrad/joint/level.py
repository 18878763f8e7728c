"""One order of derivatives: what leaves, what gradients are taken of, and the backwards recorded so far.

The first level is the function itself (`Joint`): its exits are outputs. The next is one of its backwards,
whose gradients are exits in turn (`NextOrder`). All of it are frozen values. What can be recorded in addition
is asked for at a door (`requests`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from aheadgrad.facts.facts import AliasRoot, Facts, Fresh, FreshRoot, InputFacts, IsRoot, TheInput
from aheadgrad.options import Options
from aheadgrad.program.cut import Cutter, Sizes
from aheadgrad.program.program import Program
from aheadgrad.program.same import given_values, same_values
from aheadgrad.program.slots import (
    Gradient,
    NoGradient,
    OldMemory,
    Signature,
    Slot,
    Tangent,
    UpdatedInput,
    UserOutput,
    ViewBase,
    opened,
)
from aheadgrad.program.tape import Tape
from aheadgrad.program.values import Port, Value, Write, Written
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import Number
from aheadgrad.torchlayer.wanted import Wanted

Pattern = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Entrance:
    """An input; `memory` tells which lie together. `item` is the number that a tensor with one element is.

    `static`: it stays where it is from call to call, as parameters do.
    """

    slot: Slot
    value: Any
    requires_grad: bool
    memory: int
    item: Number | None = None
    static: bool = False


@dataclass(frozen=True, eq=False)
class Exit:
    """One output of a level. A passage has no value: nobody sees it, and it has no memory.

    `expected` is how its tangent will be laid out (strides, or the form of a subclass), `order` its
    dimensions from the outermost in memory inwards. `given` tells which of its parts are the
    caller's own tensors.
    """

    slot: Slot
    value: Any
    differentiable: bool
    memory: int | None = None
    expected: Any = None
    order: tuple[int, ...] = ()
    size: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    passage: bool = False
    given: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Target:
    """Something a gradient is taken of: an input, a tensor inside of one, a leaf made inside, an output that
    another component computes ("exit") or that is a view of such ("view"), or (from the second order on) a
    tangent of the order before.

    `key` tells targets apart, at all orders. `name` is what a tensor inside of an input is called in
    generated code. `passage`: an exit that nobody sees.
    """

    kind: str
    index: int
    key: int
    slot: Slot
    name: str = ""
    is_leaf: bool = False
    passage: bool = False

    @property
    def is_boundary(self) -> bool:
        return self.kind in ("exit", "view", "member")


@dataclass(frozen=True)
class Component:
    """Exits with a common history, and the targets they lead back to.

    `keeps` are values that eager keeps for their derivatives; `saves` the memory of all that eager saves, for
    each exit; `once` the exits (by their place here) whose backward works only once; `quiet` those whose
    hooks are not called in a backward of the others; `apart`: they lead to different leaves; `viewed`: inputs
    of which views are leaves inside.
    """

    number: int
    exits: tuple[int, ...]
    targets: tuple[Target, ...]
    expected: Pattern
    keeps: tuple[Value, ...] = ()
    saves: tuple[frozenset[int], ...] = ()
    once: tuple[int, ...] = ()
    quiet: tuple[int, ...] = ()
    apart: bool = False
    viewed: tuple[int, ...] = ()

    @property
    def has_boundary(self) -> bool:
        return any(t.is_boundary for t in self.targets)


@dataclass(frozen=True, eq=False)
class Gradients:
    """What one backward computes: from tangents (None where absent) to gradients.

    `usual`: for the tangents that are expected, and of all targets.
    """

    component: Component
    tangents: tuple[Any, ...]
    grads: tuple[Any, ...]
    phase: str
    usual: bool

    def only(self, wanted: Wanted) -> Gradients:
        """Of these targets only."""
        if wanted is None:
            return self
        grads = tuple(g if asked else None for g, asked in zip(self.grads, wanted, strict=True))
        return replace(self, grads=grads, usual=False)


@dataclass(frozen=True, eq=False)
class Level:
    """What the levels have in common. `exits` are its own and, from `count` on, passages between components.

    `failures` has what backwards raise, as in eager. `fixed_sizes`: what symbols stand for, if it was
    recorded for these sizes only.
    """

    order: int
    tape: Tape = field(repr=False)
    exits: tuple[Exit, ...]
    count: int
    components: tuple[Component, ...]
    gradients: tuple[Gradients | None, ...]
    failures: Mapping[int, Exception]
    options: Options = field(repr=False)
    has_symbols: bool
    veiled: bool
    backward_autocast: AutocastState | None
    fixed_autocast: bool
    fixed_sizes: Sizes | None

    @property
    def leaving(self) -> tuple[Exit, ...]:
        return self.exits[: self.count]

    @property
    def seen(self) -> frozenset[Value]:
        """Values that others see, too, and may change."""
        return frozenset(v for e in self.leaving for v in values_of(e.value) if type(v) is Value)

    @property
    def computes_again(self) -> bool:
        """Do backwards run ops of the forward?"""
        return self.options.partition == "min_cut" or self.tape.has_regions

    @property
    def selects(self) -> bool:
        """Are there backwards for some of the gradients? The drop-in's compilers expect one backward."""
        return not (self.options.one_node and self.order == 0)

    @property
    def lays_out(self) -> bool:
        """Are tangents brought into one layout before the backward?"""
        return self.has_symbols or (self.options.one_node and self.order == 0)

    def cutter(self, tape: Tape | None = None, sizes: Sizes | None = None, same: Any = None) -> Cutter:
        return Cutter(tape or self.tape, sizes=sizes or self.fixed_sizes, same=same)

    def same(
        self, g: Gradients | None = None, given: Collection[Value] = (), tape: Tape | None = None
    ) -> dict[Value, Value]:
        """Values of which a program needs one only. Where little is kept, also those that were computed
        twice; elsewhere a backward computes nothing that it is given. Results have memory of their own. In a
        first backward views are taken as recorded."""
        merges = self.options.partition == "min_cut" and not self.options.policies
        if not merges and not self.order:
            return {}
        results = [e.value for e in self.exits] + [*(g.grads if g is not None else ())]
        apart = {v for value in results for v in values_of(value) if type(v) is Value}
        if merges:
            return same_values(tape or self.tape, given, apart, computed=True)
        found = same_values(tape or self.tape, given)
        return {**found, **given_values(tape or self.tape, given, apart)} if g is not None else found

    def gradient_outputs(self, g: Gradients) -> list[tuple[Slot, Any]]:
        """What a backward returns: the targets' gradients."""
        return [(Gradient(t.slot), grad) for t, grad in zip(g.component.targets, g.grads, strict=True)]


@dataclass(frozen=True, eq=False)
class Joint(Level):
    """The function and its gradients: everything that one run of it told us; printable.

    `wholes` are the inputs in the order of the program's, tensor subclasses as the caller gives them, numbers
    where they were given; `numbers` the symbolic ones, which an entry takes after its tensors. `members`
    tells of inputs that are aliases of others whether they have a version counter of their own; `in_graph`
    are inputs that the graph updates itself, with these `writes`.
    """

    facts: Facts
    entrances: tuple[Entrance, ...]
    members: tuple[bool, ...]
    wholes: tuple[tuple[Slot, Any], ...]
    numbers: tuple[Number, ...]
    root_memory: tuple[int, ...]
    in_graph: frozenset[int]
    writes: tuple[Write, ...]
    autocast: AutocastState | None
    grad_before: bool

    @cached_property
    def inputs(self) -> list[tuple[Slot, Any]]:
        """Slots and values of all program inputs."""
        return opened(self.wholes)

    def ports(self) -> list[Port]:
        """The inputs of a forward or joint program."""
        fixed = {v for e in self.entrances if e.static for v in values_of(e.value)}
        return [
            Port(slot, value, f"primals_{i}", type(value) is Value and value in fixed)
            for i, (slot, value) in enumerate(self.inputs, start=1)
        ]

    @cached_property
    def updated(self) -> dict[int, int]:
        """By index of an input that the call updates: the exit with its new value."""
        changed = (f.index for f in self.facts.inputs if f.index not in self.in_graph and f.is_updated)
        return self._exits_of(changed, UpdatedInput)

    @cached_property
    def old_memory(self) -> dict[int, int]:
        """By index of an input: the exit with what its former memory holds now."""
        return self._exits_of((f.index for f in self.facts.inputs if f.old_memory_changed), OldMemory)

    def _exits_of(self, inputs: Iterable[int], kind: type[Slot]) -> dict[int, int]:
        positions = [i for i, e in enumerate(self.leaving) if isinstance(e.slot, kind)]
        return dict(zip(inputs, positions, strict=True))

    @property
    def has_scalars(self) -> bool:
        """Are there inputs that are no tensors?"""
        return len(self.wholes) > len(self.entrances)

    @property
    def seen(self) -> frozenset[Value]:
        """Results and inputs, but for parameters: nobody changes those in between."""
        given = (e.value for e in self.entrances if not e.static)
        return super().seen.union(v for value in given for v in values_of(value) if type(v) is Value)

    @property
    def differentiable_again(self) -> bool:
        """Are derivatives beyond the first to be had?"""
        return self.options.any_order

    @property
    def changed(self) -> frozenset[Value]:
        """Inputs that the call overwrites, or lets a tensor subclass overwrite."""
        return self._values(f for f in self.facts.inputs if f.data_changed or f.storage_changed)

    @property
    def reshaped(self) -> frozenset[Value]:
        """Inputs that look different after the call."""
        return self._values(f for f in self.facts.inputs if f.geometry is not None)

    def _values(self, inputs: Iterable[InputFacts]) -> frozenset[Value]:
        found = [(Slot(), self.entrances[f.index].value) for f in inputs if f.index >= 0]
        return frozenset(v for _, v in opened(found))

    def results(self, *, inference: bool) -> list[tuple[Slot, Any]]:
        """What the forward returns: an input that the graph updated and the user returned is itself."""
        found: list[tuple[Slot, Any]] = []
        for e in self.leaving:
            value = e.value
            if isinstance(e.slot, UserOutput):
                fact = self.facts.outputs[e.slot.index]
                if isinstance(fact, TheInput) and fact.index in self.in_graph:
                    given = self.entrances[fact.index].value
                    value = Written(given) if inference else given
            found.append((e.slot, value))
        return opened(found)

    def gradient_outputs(self, g: Gradients) -> list[tuple[Slot, Any]]:
        """The targets' gradients; in the drop-in's graphs, one per input."""
        found = super().gradient_outputs(g)
        if not self.options.one_node or self.veiled:
            return found
        by_input = {t.index: k for k, t in enumerate(g.component.targets) if t.kind == "input"}
        entrance = {e.value: i for i, e in enumerate(self.entrances)}
        each: list[tuple[Slot, Any]] = []
        for slot, value in self.inputs:
            k = by_input.get(entrance.get(value, -1) if type(value) is Value else -1)
            each.append((NoGradient(slot), None) if k is None else found[k])
        return each + [f for t, f in zip(g.component.targets, found, strict=True) if t.kind != "input"]

    @cached_property
    def program(self) -> Program:
        """The joint program: `(primals, tangents) -> (outputs, gradients)`."""
        ports = self.ports()
        outputs = self.results(inference=False)
        phases = {"forward"}
        number = 0
        for g in self.gradients:
            if g is None:
                continue
            phases.add(g.phase)
            for i, tangent in zip(g.component.exits, g.tangents, strict=True):
                for slot, value in opened([(Tangent(self.exits[i].slot), tangent)]):
                    if value is not None:
                        number += 1
                        ports.append(Port(slot, value, f"tangents_{number}"))
            outputs += opened(self.gradient_outputs(g))
        return self.cutter().cut("joint", ports, outputs, phases, self.writes)

    @property
    def signature(self) -> Signature:
        return self.program.signature

    def __str__(self) -> str:
        return str(self.program)


@dataclass(frozen=True, eq=False)
class NextOrder(Level):
    """The gradients of one backward, ready to be differentiated.

    `recorded` is that backward and `below` has the slots of its exits; `tangents` has the key of each of its
    tangents that requires grad; `passed_on` has, by exit, the key of the target that a gradient simply is.
    """

    recorded: Gradients
    below: tuple[Slot, ...]
    tangents: tuple[int | None, ...]
    passed_on: Mapping[int, int]


def slot_of_root(root: FreshRoot | AliasRoot) -> UserOutput | ViewBase | None:
    """As what a root leaves the program; None for an alias without a history of its own."""
    if root.output is not None:
        return UserOutput(root.output)
    return None if root.base is None else ViewBase(root.base)


SAVED_BY_DATA = "an alias made with .data is returned and its memory is saved for backward"


def slots_apart(facts: Facts) -> list[Slot]:
    """Results that get a version counter of their own."""
    slots: list[Any] = [
        UserOutput(j) for j, f in enumerate(facts.outputs) if isinstance(f, Fresh) and f.apart
    ]
    slots += [slot_of_root(r) for r in facts.roots if isinstance(r, FreshRoot) and r.apart]
    return slots


def is_handed_out(facts: Facts, slot: Slot) -> bool:
    """Is this result handed out as it is (rather than made again from a root)?"""
    if isinstance(slot, ViewBase):
        return True
    if not isinstance(slot, UserOutput):
        return False
    fact = facts.outputs[slot.index]
    if isinstance(fact, IsRoot):
        return isinstance(facts.roots[fact.root], FreshRoot)
    return isinstance(fact, Fresh)

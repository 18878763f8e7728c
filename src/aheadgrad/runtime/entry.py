"""The last stage: nodes, the entry function, and what stays of the compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aheadgrad.backends.contract import Executable
from aheadgrad.conventions.assembly import Assembly, NodeCall
from aheadgrad.conventions.whole_subclasses import backward_of_wholes, forward_of_wholes
from aheadgrad.emit.script import Namespace
from aheadgrad.emit.sizes import SizeTexts
from aheadgrad.facts.facts import Fresh, FunctionView
from aheadgrad.joint.level import Component, Joint, is_handed_out
from aheadgrad.partition.saved import Split
from aheadgrad.partition.wanted import is_little
from aheadgrad.program.slots import UpdatedInput, UserOutput
from aheadgrad.program.values import Value
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.arrange import arranged
from aheadgrad.runtime.assemble import Assembled, assemble, target_name
from aheadgrad.runtime.backward import Failure
from aheadgrad.runtime.differentiable import Higher
from aheadgrad.runtime.further_steps import Steps, backward_of
from aheadgrad.runtime.links import Ways
from aheadgrad.runtime.node import Direct, make_node
from aheadgrad.runtime.saved_names import SavedNames
from aheadgrad.runtime.watch import watches
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, is_view_op
from aheadgrad.torchlayer.subclasses import values_of


@dataclass(frozen=True, eq=False)
class Executables:
    """The compiled forward, and the backward of each component."""

    forward: Executable
    backwards: tuple[Executable | None, ...]


@dataclass(eq=False)
class Entry:
    """A compiled entry: `run(*inputs)` gives the flat outputs.

    `captured` is the live recording, for whoever makes a check for the entry. `close` lets go of it: the
    entry still runs everything that it was compiled for.
    """

    assembled: Assembled
    source: str
    joint: Joint
    split: Split
    executables: Executables
    journal: Journal
    steps: Steps
    captured: Any

    @property
    def run(self) -> Callable[..., list[Any]]:
        return self.assembled.run

    def close(self) -> None:
        self.steps.close()
        self.captured = None


def make_entry(
    joint: Joint,
    split: Split,
    compiled: Executables,
    journal: Journal,
    steps: Steps,
    recording: Any,
    returns: Callable[[list[str], Namespace], str] | None,
) -> Entry:
    """`returns` writes the entry's return value from the names of the flat outputs."""
    making = _Making(joint, split, compiled, steps)
    assembly, sources = making.assembly()
    if returns is not None:
        assembly.returns = lambda texts: returns(texts, assembly.names)
    assembled = assemble(assembly)
    source = "\n\n".join([assembled.source, *sources])
    return Entry(assembled, source, joint, split, compiled, journal, steps, recording)


class _Making:
    """The parts of one entry function."""

    def __init__(self, joint: Joint, split: Split, compiled: Executables, steps: Steps) -> None:
        self.joint = joint
        self.split = split
        self.compiled = compiled
        self.steps = steps
        self.saved_names = SavedNames(joint, split)
        outputs = len(split.forward.outputs)
        self.results = outputs - sum(len(values_of(e.value)) - 1 for e in joint.leaving)
        if joint.veiled:
            self.forward = forward_of_wholes(joint, compiled.forward, outputs)
        else:
            self.forward = arranged(joint, compiled.forward)
        self.views = _view_results(joint)

    def assembly(self) -> tuple[Assembly, list[str]]:
        joint = self.joint
        made = [self._node(component) for component in joint.components]
        sizes = SizeTexts(joint, self._told_sizes()) if joint.has_symbols else None
        assembly = Assembly(
            joint=joint,
            inputs=len(joint.entrances) + len(joint.numbers),
            forward=self.forward,
            results=self.results,
            nodes=[call for call, _ in made],
            view_results=self.views,
            inference=torch.is_inference_mode_enabled(),
            members=tuple(f"m{k}" for k in range(len(joint.members))),
            used_before=_used_before(joint),
            names=Namespace(sizes),
        )
        return assembly, [source for _, source in made]

    def _told_sizes(self) -> dict[Any, str]:
        """Sizes that values decide: which result of the forward is which."""
        made = self.joint.tape.makers
        told = [(number.expr, name) for name, number in self.split.all_saved.sizes]
        return {expr: self._size_name(name) for expr, name in told if expr in made}

    def _size_name(self, name: str) -> str:
        names = [n for n, _ in self.split.all_saved.sizes]
        return f"r{self.results - len(names) + names.index(name)}"

    def _node(self, component: Component) -> tuple[NodeCall, str]:
        joint, number = self.joint, component.number
        saved, gradients = self.split.saved[number], self.split.gradients[number]
        run, usual = self.compiled.backwards[number], None
        if run is not None and gradients is not None and gradients.usual:
            usual = backward_of_wholes(gradients, run, len(saved.values))
        watched = watches(joint, component, saved)
        tensor_names = [self.saved_names.of(component, s) for s in saved.tensors]
        direct = self._direct(component, watched, tensor_names)
        ways = self._ways(component, tensor_names, direct)
        failure = joint.failures.get(number)
        backward = backward_of(joint, component, saved, usual, self.steps)
        apply, source = make_node(
            backward,
            len(component.exits),
            len(saved.tensors),
            len(saved.sizes),
            len(component.targets),
            str(number),
            ways=ways,
            higher=Higher(joint, component, saved, ways, backward, self.steps),
            watched=bool(watched),
            failure=None if failure is None else Failure(failure),
            direct=direct,
            selects=joint.selects,
            little=usual is not None and is_little(self.split.backwards[number]),
            fresh=tuple(name.startswith("r") for name in tensor_names),
            feeds=any(c.has_boundary for c in joint.components),
            quiet=component.quiet,
            apart=component.apart,
            viewed=bool(component.viewed),
        )
        sizes = [self._size_name(name) for name, _ in saved.sizes]
        told = direct is not None, bool(ways.loose), watched, component.viewed
        return NodeCall(apply, component.exits, tensor_names, sizes, component.targets, *told), source

    def _ways(self, component: Component, saved: list[str], direct: Direct | None) -> Ways:
        """How the node's backward finds its inputs again; not in saved ones that changed since."""
        if not self.joint.differentiable_again:
            return Ways((), ())
        facts = self.joint.facts.inputs
        reshaped = {f.index for f in facts if f.geometry is not None or f.storage_changed}
        names = [
            "" if t.kind == "input" and t.index in reshaped else target_name(t, self.joint)
            for t in component.targets
        ]
        carried = tuple(saved.index(name) if name in saved else None for name in names)
        positions = direct.positions if direct is not None else tuple(range(len(names)))
        return Ways(positions, carried, bool(reshaped))

    def _direct(self, component: Component, watched: list[Any], saved: list[str]) -> Direct | None:
        """The direct form of the only node, for a call that has nothing to do around its program."""
        joint, inline = self.joint, self.forward.inline
        plain = (
            inline is not None
            and joint.grad_before
            and joint.autocast is None
            and not (watched or component.viewed or joint.members or joint.has_scalars or joint.facts.roots)
            and not self.split.all_saved.sizes
            and len(joint.components) == 1
            and component.exits == tuple(range(joint.count))
            and all(t.kind == "input" for t in component.targets)
            and all(f.untouched for f in joint.facts.inputs)
            and joint.facts.grad_mode_after is None
            and all(
                isinstance(f, Fresh) and f.geometry is f.history_look is None and not f.apart
                for f in joint.facts.outputs
            )
        )
        if not plain or not component.targets:
            return None
        reached = {t.index for t in component.targets}
        if any(e.requires_grad and i not in reached for i, e in enumerate(joint.entrances)):
            return None  # a node is linked to all its inputs, and a backward would go on to those in vain
        assert inline is not None
        return Direct(
            inline,
            tuple(f"p{i}" for i in range(len(joint.entrances))),
            tuple(t.index for t in component.targets),
            self.results,
            self.views,
            tuple(saved),
            len(component.exits),
        )


def _used_before(joint: Joint) -> tuple[str, ...]:
    """Leaves whose gradients have the size that they enter with, though they leave with another."""
    found = []
    for g in joint.gradients:
        for target, grad in zip(g.component.targets, g.grads, strict=True) if g is not None else ():
            fact = joint.facts.input(target.index) if target.kind == "input" else None
            if fact is None or fact.geometry is None or fact.history_changed or grad is None:
                continue
            if tuple(grad.size()) != tuple(fact.geometry.size) and target.is_leaf:
                found.append(f"p{target.index}")
    return tuple(found)


def _view_results(joint: Joint) -> frozenset[int]:
    """Results that are handed out, or get a history, and that the graph makes with a view op, or twice; not
    those that are views in eager, too."""
    found = set()
    seen: set[Value] = set()
    for i, e in enumerate(joint.leaving):
        if type(e.value) is not Value or e.given == (True,):
            continue
        if not (isinstance(e.slot, UpdatedInput) or e.differentiable or is_handed_out(joint.facts, e.slot)):
            continue
        if isinstance(e.slot, UserOutput) and isinstance(joint.facts.outputs[e.slot.index], FunctionView):
            continue
        made = joint.tape.of(e.value)
        if made is None or _may_be_view(made.target) or e.value in seen:
            found.add(i)
        seen.add(e.value)
    return frozenset(found)


def _may_be_view(target: Any) -> bool:
    return is_view_op(target) or isinstance(target, HigherOrderOperator)

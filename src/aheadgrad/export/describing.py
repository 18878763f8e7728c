"""Writes the signature of one stage: what its programs take and give, by names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from aheadgrad.export.dynamic_shapes import conditions_of, sizes_of
from aheadgrad.export.matching import storage_of
from aheadgrad.export.programs import Constants
from aheadgrad.export.recorded import Recorded
from aheadgrad.export.signature import (
    Argument,
    Backward,
    CallSignature,
    GradientOf,
    Held,
    Leaving,
    Place,
    TangentOf,
)
from aheadgrad.export.trees import Tree, paths
from aheadgrad.facts.facts import InputRoot, TheInput
from aheadgrad.joint.level import Gradients, Joint, Target
from aheadgrad.program.doors import type_of
from aheadgrad.program.program import Program
from aheadgrad.program.values import TensorType, Value
from aheadgrad.torchlayer.subclasses import Bundle, Form, form_of, is_foreign, values_of

_KEPT = ("parameter", "buffer")  # are inputs of programs whether they are used or not


class Describing:
    """`tensors` are those that the stage holds, by name."""

    def __init__(self, found: Recorded, joint: Joint, loss: int | None, kind: str) -> None:
        self.found, self.joint, self.loss, self.kind = found, joint, loss, kind
        count = len(joint.entrances)
        self.inputs, self.members = tuple(found.places[:count]), tuple(found.places[count:])
        self.kinds = {h.name: h.kind for h in found.tensors}
        self.taken: list[int] = []
        self.tensors: dict[str, Tensor] = {}

    def without_unused(self, program: Program) -> Program:
        """The first program without what it does not use of what is held, parameters and buffers excepted."""
        used = {v for op in program.ops for v in op.uses} | {v for v in program.results if type(v) is Value}
        away: set[Value] = set()
        for i, e in enumerate(self.joint.entrances):
            place = self.inputs[i]
            kept = place.kind != "held" or self.kinds.get(place.of) in _KEPT
            if kept or not used.isdisjoint(values_of(e.value)):
                self.taken.append(i)
            else:
                away.update(values_of(e.value))
        ports = tuple(p for p in program.inputs if type(p.value) is not Value or p.value not in away)
        return replace(program, inputs=ports)

    def signature(self, takes: Tree, constants: Any, lifted: Constants) -> CallSignature:
        found, joint, left = self.found, self.joint, self.found.left
        made = tuple((name, found.made_at(name)) for name in left.made)
        return CallSignature(
            kind=self.kind,
            held=(*self._held(), *self._constants(constants, lifted), *self._made(made)),
            arguments=self._arguments(),
            inputs=self.inputs,
            taken=tuple(self.taken),
            members=self.members,
            constants=constants,
            leaving=tuple(Leaving(e.slot, _form(e.value)) for e in joint.leaving),
            outputs=tuple(paths(left.returns)),
            updates=tuple(joint.updated.items()),
            old_memory=tuple(joint.old_memory.items()),
            finds=tuple(sorted(left.found & left.tracked)),
            made=made,
            renewed=tuple((name, found.made_at(name)) for name in left.renewed),
            gone=tuple(sorted((left.found - left.there) & left.tracked)),
            backwards=tuple(self._backward(g) for g in joint.gradients if g is not None),
            loss=self.loss,
            takes=takes,
            returns=left.returns,
            facts=joint.facts,
            sizes=sizes_of(joint, self.inputs),
            conditions=conditions_of(found.recording),
            exact_memory=found.recording.depends_on_offsets,
            numbers=left.numbers,
        )

    def _held(self) -> list[Held]:
        reals = dict(zip(self.found.places, self.found.reals, strict=True))
        wanted = {self.inputs[i] for i in self.taken} | self._mentioned()
        wanted |= {Place("held", name) for name in self.found.left.renewed}
        found = []
        for h in self.found.tensors:
            place = Place("held", h.name)
            if place in wanted or (h.kind in _KEPT and place in reals):
                found.append(_describe_held(h.tensor, h.name, h.kind, tuple(h.names)))
                self.tensors[h.name] = h.tensor
        for name, t in self.found.constants.items():
            if Place("held", name) in wanted:
                found.append(_describe_held(t, name, "tensor", (name,)))
                self.tensors[name] = t
        return found

    def _mentioned(self) -> set[Place]:
        """Tensors that are changed, or that results share memory with."""
        facts = self.joint.facts
        found = {f.index for f in facts.inputs if not f.untouched}
        found |= {r.index for r in facts.roots if isinstance(r, InputRoot)}
        found |= {f.index for f in facts.outputs if isinstance(f, TheInput)}
        places = {self.inputs[i] if i >= 0 else self.members[-1 - i] for i in found}
        places |= {p for p in self.members if p.kind == "held"}
        return places | {p.of for p in places if isinstance(p.of, Place)}

    def _constants(self, constants: Any, lifted: Constants) -> list[Held]:
        names = dict.fromkeys(name for some in constants for name in some)
        return [_describe_held(lifted.tensors[n], n, "constant", (n,)) for n in names]

    def _made(self, made: tuple[tuple[str, int], ...]) -> list[Held]:
        found = []
        for name, index in made:
            value = self.found.output(index)
            kind = "gradient" if name in self.found.left.gradients else "state"
            found.append(Held(name, kind, _type(value), names=(name,), form=_form(value), made=True))
        return found

    def _arguments(self) -> tuple[Argument, ...]:
        flat, known = self.found.flat, {id(h.tensor): Place("held", h.name) for h in self.found.tensors}
        entered = dict(zip(self.inputs, self.joint.entrances, strict=True))
        storages: dict[Any, int] = {}
        found = []
        for k, (leaf, path) in enumerate(zip(flat.leaves, flat.paths, strict=True)):
            if not isinstance(leaf, Tensor):
                found.append(Argument(path, k, value=leaf))
                continue
            memory = storages.setdefault(storage_of(leaf), k)
            before = known.setdefault(id(leaf), Place("argument", k))
            same = None if before == Place("argument", k) else before
            entrance = entered.get(Place("argument", k))
            seen = None if entrance is None else _type(entrance.value)
            form = form_of(leaf) if is_foreign(leaf) else None
            look = None if form is not None else seen or type_of(leaf)
            found.append(Argument(path, memory, look, leaf.requires_grad, form, same_as=same))
        return tuple(found)

    def _backward(self, g: Gradients) -> Backward:
        split_up = self.loss is None or self.kind == "split"
        pairs = zip(g.component.exits, g.tangents, strict=True) if split_up else ()
        tangents = tuple(TangentOf(i, _type(t), _form(t)) for i, t in pairs if t is not None)
        found = [self._gradient(t, grad) for t, grad in zip(g.component.targets, g.grads, strict=True)]
        return Backward(tangents, tuple(found))

    def _gradient(self, target: Target, grad: Any) -> GradientOf:
        place = None
        if target.kind == "input":
            place = self.inputs[target.index]
        elif target.kind == "inside" and target.name == f"m{target.index}":
            place = self.members[target.index]
        name = target.slot.describe() if place is None else place.name(self.found.flat.paths)
        return GradientOf(name, place, _form(grad), grad is None)


def _describe_held(t: Tensor, name: str, kind: str, names: tuple[str, ...]) -> Held:
    if is_foreign(t):
        return Held(name, kind, None, t.requires_grad, names, form_of(t))
    return Held(name, kind, type_of(t.detach()), t.requires_grad, names)


def _form(value: Any) -> Form | None:
    return value.form if type(value) is Bundle else None


def _type(value: Any) -> TensorType | None:
    return value.type if type(value) is Value else None

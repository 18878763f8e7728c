"""Do the parts of an export fit together? Asked of files, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aheadgrad.errors import ArtifactError
from aheadgrad.export.signature import CallSignature, Place, Stage
from aheadgrad.export.trees import Tree
from aheadgrad.facts.facts import FreshRoot, InputRoot, IsRoot, Recipe, SameAs, TheInput, ViewOf
from aheadgrad.joint.level import slot_of_root
from aheadgrad.program.check import check
from aheadgrad.program.slots import Saved, SavedSize, UserOutput
from aheadgrad.program.values import TensorType, Value
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.memory import reach
from aheadgrad.torchlayer.subclasses import Form
from aheadgrad.torchlayer.symbols import Number

_SAVED = Saved | SavedSize
_KINDS = ("forward", "joint", "split")


def check_export(stages: Any, state: Mapping[str, Tensor]) -> tuple[Stage, ...]:
    """The stages; ArtifactError says what does not fit."""
    _need(isinstance(stages, tuple) and 1 <= len(stages) <= 4, "is no export")
    for stage in stages:
        _need(isinstance(stage, Stage), "is no export")
        for program in stage.programs:
            check(program)
        _Checking(stage).check(state)
    signatures = [stage.signature for stage in stages]
    maybe = {name for s in signatures for name in (*s.finds, *(n for n, _ in s.made))}
    kinds = [s.finds for s in signatures]
    _need(len(set(kinds)) == len(kinds), "has two stages for one kind of call")
    _need(tuple(sorted(maybe & state.keys())) in kinds, "has no stage for what there is")
    for s in signatures:
        left = {*s.finds, *(name for name, _ in s.made)} - {*s.gone}
        _need({*s.gone} <= {*s.finds} and tuple(sorted(left)) in kinds, "leaves what no call begins with")
        for h in s.held:
            _need(h.name in state or h.name in maybe, f"lacks the tensor {h.name}")
    return tuple(stages)


def _need(holds: Any, what: str) -> None:
    if not holds:
        raise ArtifactError(f"The parts of this export do not fit together: it {what}.")


def _within(index: Any, count: int, what: str, *, low: int = 0) -> None:
    _need(type(index) is int and low <= index < count, f"has {what} {index}, of {count}")


class _Checking:
    def __init__(self, stage: Stage) -> None:
        self.programs, self.signature = stage.programs, stage.signature
        self.held = {h.name: h for h in self.signature.held}

    def check(self, state: Mapping[str, Tensor]) -> None:
        s = self.signature
        _need(s.kind in _KINDS, f"is of kind {s.kind!r}")
        backwards = len(s.backwards) if s.kind == "split" else 0
        _need(len(self.programs) == len(s.constants) == 1 + backwards, "has another number of programs")
        _need(s.takes.kind == "tuple" and len(s.takes.children) == 2, "takes no arguments")
        for tree in (s.takes, s.returns):
            _tree(tree)
        _need(s.takes.leaves == len(s.arguments), "has another number of arguments")
        _need(s.returns.leaves == len(s.outputs) <= len(s.facts.outputs), "has another number of outputs")
        for h in s.held:
            if h.name in state:
                self._looks(state[h.name], h)
        for place in (*s.inputs, *s.members, *(a.same_as for a in s.arguments if a.same_as is not None)):
            self._place(place)
        for size in s.sizes:
            _within(size.argument, len(s.arguments), "a size of argument")
            look = s.arguments[size.argument].type
            _need(look is not None, "has a size of something else than a tensor")
            _within(size.dimension, len(look.size) if look is not None else 0, "a size in dimension")
        _need(all(type(c) is Number for c in s.conditions), "has a condition that is none")
        self._inputs()
        self._outputs()
        self._saved()
        self._facts(s)

    def _looks(self, t: Tensor, held: Any) -> None:
        able = t.is_floating_point() or t.is_complex()
        _need(able or not held.requires_grad, f"has a gradient of {held.name}, which is of whole numbers")
        if held.form is not None:
            _need(held.form.parts(t) is not None, f"holds something else than {held.name}")
        else:
            look = None if held.type is None else (held.type.dtype, tuple(held.type.size))
            _need(look == (t.dtype, tuple(t.size())), f"holds something else than {held.name}")

    def _place(self, place: Place) -> None:
        if place.kind in ("memory", "base"):
            _need(
                isinstance(place.of, Place) and place.of.kind in ("argument", "held"), "has a place in none"
            )
            self._place(place.of)
        elif place.kind == "argument":
            _within(place.of, len(self.signature.arguments), "argument")
            _need(self.signature.arguments[place.of].is_tensor, "takes for a tensor what is none")
        else:
            _need(place.kind == "held", f"has a place of kind {place.kind!r}")

    # ---- programs -----------------------------------------------------------------------------

    def _inputs(self) -> None:
        """The first program takes what the signature says, in number and kind."""
        s = self.signature
        expected: list[Any] = []
        for i in s.taken:
            _within(i, len(s.inputs), "input")
            expected += self._types(s.inputs[i])
        tangents = [t for b in s.backwards for t in b.tangents] if s.kind == "joint" else []
        for t in tangents:
            expected += [None] * _count(t.form)
        for names in s.constants:
            _need(all(n in self.held for n in names), "lacks a constant")
        expected += [self.held[n].type for n in s.constants[0]]
        ports = self.programs[0].inputs
        _need(len(ports) == len(expected), "has a program with another number of inputs")
        for port, look in zip(ports, expected, strict=True):
            _need(type(port.value) is Value, f"has an input {port.name} that is no tensor")
            fits = look is None or (look.dtype, look.size) == (port.value.type.dtype, port.value.type.size)
            _need(fits, f"has another type for the input {port.name}")

    def _types(self, place: Place) -> list[Any]:
        """What the plain tensors at a place look like, None where that is left open."""
        if isinstance(place.of, Place):
            return [None]
        if place.kind == "argument":
            a = self.signature.arguments[place.of]
            return [a.type] if a.form is None else [None] * _count(a.form)
        _need(place.of in self.held, f"lacks the tensor {place.of}")
        h = self.held[place.of]
        return [h.type] if h.form is None else [None] * _count(h.form)

    def _outputs(self) -> None:
        s = self.signature
        leaving = sum(_count(e.form) for e in s.leaving)
        results = self.programs[0].outputs
        grads = [sum(_count(g.form) for g in b.gradients) for b in s.backwards]
        more = sum(grads) if s.kind != "split" else 0
        _need(len(results) >= leaving + more, "has a program with fewer outputs")
        for e, (slot, _) in zip(s.leaving, results, strict=False):
            _need(e.form is not None or e.slot == slot, f"has another output than {e.slot.describe()}")
            if e.form is not None:
                break  # parts follow
        for program, count in zip(self.programs[1:], grads, strict=False):
            _need(len(program.outputs) == count, "has a backward with other gradients")
        for b in s.backwards:
            for t in b.tangents:
                _within(t.leaving, len(s.leaving), "a tangent of result")
            for g in b.gradients:
                if g.place is not None:
                    self._place(g.place)
        for _, position in (*s.updates, *s.old_memory):
            _within(position, len(s.leaving), "result")
        single = {slot: type(v) is Value and v.type.size == () for slot, v in results}
        for k in s.numbers:
            _need(single.get(UserOutput(k)), f"has no number {k}")
        _need(all(name in self.held for name, _ in s.renewed), "renews what it does not hold")
        for _, number in (*s.made, *s.renewed):
            _within(number, len(s.facts.outputs), "output")
        if s.loss is not None:
            _within(s.loss, len(s.outputs), "the loss")

    def _saved(self) -> None:
        """Each backward takes what the forward saves, then its tangents and constants."""
        s = self.signature
        saved = {slot.name for slot in self.programs[0].signature.outputs if isinstance(slot, _SAVED)}
        for program, b, constants in zip(self.programs[1:], s.backwards, s.constants[1:], strict=False):
            slots = program.signature.inputs
            names = [slot.name for slot in slots if isinstance(slot, _SAVED)]
            rest = sum(_count(t.form) for t in b.tangents) + len(constants)
            fits = saved.issuperset(names) and len(slots) == len(names) + rest
            _need(fits, "has a backward that takes what the forward does not save")

    # ---- memory -------------------------------------------------------------------------------

    def _facts(self, s: CallSignature) -> None:
        slots = {e.slot for e in s.leaving}
        low, high = -len(s.members), len(s.inputs)
        inputs = [f.index for f in s.facts.inputs] + [i for i, _ in (*s.updates, *s.old_memory)]
        inputs += [f.adopts for f in s.facts.inputs if f.adopts is not None]
        for r, root in enumerate(s.facts.roots):
            if isinstance(root, InputRoot):
                inputs.append(root.index)
            elif isinstance(root, FreshRoot):
                _need(slot_of_root(root) in slots, "has a view of nothing")
            else:
                _within(root.of, r, "an alias of root")
                self._recipe(root.recipe)
        for j, fact in enumerate(s.facts.outputs):
            if isinstance(fact, TheInput):
                inputs.append(fact.index)
            elif isinstance(fact, SameAs):
                _within(fact.output, j, "the same output as")
            elif isinstance(fact, IsRoot | ViewOf):
                _within(fact.root, len(s.facts.roots), "a view of root")
                self._recipe(fact.recipe if isinstance(fact, ViewOf) else Recipe())
            else:
                _need(UserOutput(j) in slots, f"lacks output {j}")
        for index in inputs:
            _within(index, high, "input", low=low)
        updated = dict(s.updates)
        for f in s.facts.inputs:
            place = s.place(f.index)
            there = place.kind != "held" or (place.of in self.held and place.of not in dict(s.made))
            _need(f.untouched or there, f"changes {place.of}, which is not there when a call begins")
            if place.kind == "held" and there and f.final_bytes is not None:
                look = self.held[place.of].type
                least = 0 if look is None else _bytes(look)
                _need(f.final_bytes >= least, f"takes the memory of {place.of} away")
            if f.data_changed or (f.storage_changed and f.adopts is None):
                _need(f.index in updated, "changes an input without a new value")

    def _recipe(self, recipe: Recipe) -> None:
        _need(
            all(is_view_op(step.target) or step.in_place for step in recipe.steps), "has a view that is none"
        )


def _bytes(look: TensorType) -> int:
    """How much memory a tensor reaches; nothing is known of sizes that are symbols."""
    if any(type(n) is not int for n in look.numbers):
        return 0
    return int(reach(look.size, look.stride, look.offset)) * look.dtype.itemsize


def _tree(tree: Tree) -> None:
    named = bool(tree.keys) or tree.kind not in ("leaf", "tuple", "list", "deque", "sequence")
    _need(not named or len(tree.keys) == len(tree.children), f"has a {tree.kind} with other keys")
    for child in tree.children:
        _tree(child)


def _count(form: Form | None) -> int:
    return 1 if form is None else len(form.plain)

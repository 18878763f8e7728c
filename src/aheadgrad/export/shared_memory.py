"""Memory around a program: inputs get what they were changed to, results share what they shared.

As `conventions` writes it into entry functions, without the histories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from aheadgrad.errors import UnsupportedInput
from aheadgrad.export.signature import Argument, CallSignature, Place
from aheadgrad.facts.facts import (
    AliasRoot,
    Constant,
    Fresh,
    FreshRoot,
    FunctionView,
    Geometry,
    InputFacts,
    InputRoot,
    IsRoot,
    Recipe,
    SameAs,
    TheInput,
    ViewOf,
)
from aheadgrad.joint.level import slot_of_root
from aheadgrad.program.slots import Slot, UserOutput
from aheadgrad.program.values import map_leaves
from aheadgrad.torchlayer.subclasses import parts_of

Size = Callable[[Any], Any]


def update(
    target: Tensor,
    fact: InputFacts,
    new: Tensor | None,
    former: Tensor | None,
    adopted: Tensor | None,
    size: Size,
) -> None:
    """Gives an input its new value, shape and memory; `adopted` is the input whose memory it takes over."""
    if fact.parts is not None:
        _update_parts(target, fact, new)
    elif fact.storage_changed:
        if former is not None:
            target.detach().copy_(former)
        if adopted is None:
            assert new is not None
            target.set_(new.detach())  # type: ignore[call-overload]
        else:
            g = _numbers(fact.final_geometry, size)
            target.set_(adopted.untyped_storage(), g.offset, g.size, g.stride)
            if fact.data_changed and new is not None and fact.history_changed:
                target.copy_(new)
    else:
        if fact.geometry is not None:
            g = _numbers(fact.geometry, size)
            target.as_strided_(g.size, g.stride, g.offset)
        if fact.data_changed:
            assert new is not None
            target.copy_(new)
    if fact.final_bytes is not None:
        target.untyped_storage().resize_(fact.final_bytes)
    if fact.becomes_leaf is not None:
        target.requires_grad_(fact.becomes_leaf)


def _update_parts(target: Tensor, fact: InputFacts, new: Tensor | None) -> None:
    assert fact.parts is not None
    for call in fact.parts.reshapes:
        call.function(target, *call.args, **call.kwargs)
    if new is None:
        return
    for k, (part, value) in enumerate(zip(parts_of(target), parts_of(new), strict=True)):
        if k in fact.parts.changed:
            part.copy_(value)
    if fact.parts.exchanged:
        names, _ = target.__tensor_flatten__()  # type: ignore[attr-defined]
        for k in fact.parts.exchanged:
            setattr(target, names[k], parts_of(new)[k])


def _numbers(g: Geometry | None, size: Size) -> Geometry:
    assert g is not None
    return Geometry(*map_leaves((g.size, g.stride, g.offset), size))


class Sharing:
    """The flat results of one call."""

    def __init__(self, signature: CallSignature, places: Mapping[Place, Tensor], size: Size) -> None:
        self.signature, self.facts = signature, signature.facts
        self.places, self.size = places, size
        self.values: dict[Slot | None, Any] = {}
        self.roots: dict[int, Tensor] = {}

    def outputs(self, leaving: list[Any]) -> list[Any]:
        """Given the results of the forward."""
        self.values = {e.slot: v for e, v in zip(self.signature.leaving, leaving, strict=True)}
        found: list[Any] = []
        for j, fact in enumerate(self.facts.outputs):
            found.append(self._output(j, fact, found))
        return found

    def _output(self, j: int, fact: Any, before: list[Any]) -> Any:
        if isinstance(fact, Constant):
            return map_leaves(fact.value, self.size)
        if isinstance(fact, TheInput):
            return self.places[self.signature.place(fact.index)]
        if isinstance(fact, SameAs):
            return before[fact.output]
        if isinstance(fact, IsRoot):
            return self._root(fact.root)
        if isinstance(fact, ViewOf):
            return self._leaf(self._grow(self._root(fact.root), fact.recipe), fact.leaf)
        assert isinstance(fact, Fresh | FunctionView)
        value = self.values[UserOutput(j)]
        if isinstance(fact, Fresh):
            if fact.geometry is not None:
                g = _numbers(fact.geometry, self.size)
                value = value.as_strided(g.size, g.stride, g.offset)
            value = self._leaf(value, fact.leaf)
        return value

    def _leaf(self, t: Tensor, leaf: bool) -> Tensor:
        return t.detach().requires_grad_() if leaf else t

    def _root(self, r: int) -> Tensor:
        if r not in self.roots:
            root = self.facts.roots[r]
            if isinstance(root, InputRoot):
                made = self.places[self.signature.place(root.index)]
            elif isinstance(root, FreshRoot):
                made = self._leaf(self.values[slot_of_root(root)], root.leaf)
            else:
                assert isinstance(root, AliasRoot)
                made = self._leaf(self._grow(self._root(root.of), root.recipe), root.leaf)
            self.roots[r] = made
        return self.roots[r]

    def check(self) -> None:
        """Before the call: can results be views of arguments that lie otherwise than they did?"""
        for fact in (*self.facts.roots, *self.facts.outputs):
            if not isinstance(fact, AliasRoot | ViewOf):
                continue
            base = fact.of if isinstance(fact, AliasRoot) else fact.root
            argument = self._lies_otherwise(base)
            if argument is None:
                continue
            try:
                self._grow(self._root(base), fact.recipe)
            except RuntimeError as error:
                raise UnsupportedInput(
                    f"{argument.path} lies in memory in another way than when this was exported, and there "
                    f"is no such view of it as the function returns ({error}). Pass a contiguous tensor."
                ) from error

    def _lies_otherwise(self, r: int) -> Argument | None:
        """The argument behind a root, if its strides are other than they were, and it stays as it is."""
        root = self.facts.roots[r]
        if isinstance(root, AliasRoot):
            return self._lies_otherwise(root.of)
        place = self.signature.place(root.index) if isinstance(root, InputRoot) else None
        if place is None or place.kind != "argument":
            return None
        argument = self.signature.arguments[place.of]
        known = argument.type and map_leaves(argument.type.stride, self.size)
        return argument if known is not None and self.places[place].stride() != known else None

    def _grow(self, t: Tensor, recipe: Recipe) -> Tensor:
        for step in recipe.steps:
            kwargs = {k: map_leaves(v, self.size) for k, v in step.kwargs}
            made = step.target(t, *map_leaves(step.args, self.size), **kwargs)
            t = made if step.part is None else made[step.part]
        if recipe.geometry is not None:
            g = _numbers(recipe.geometry, self.size)
            t = t.as_strided(g.size, g.stride, g.offset)
        return t if recipe.cut is None else t.detach()

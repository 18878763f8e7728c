"""The facts as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aheadgrad.torchlayer.symbols import typical


@dataclass(frozen=True)
class Geometry:
    """Sizes, strides and offset of a strided tensor."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any

    @property
    def typical(self) -> Geometry:
        """With numbers in place of sizes that values decide: for questions to it."""
        return Geometry(
            tuple(map(typical, self.size)), tuple(map(typical, self.stride)), typical(self.offset)
        )

    @property
    def repeats(self) -> bool:
        """Does one element stand for several?"""
        return any(s == 0 and n > 1 for s, n in zip(self.typical.stride, self.typical.size, strict=True))


@dataclass(frozen=True, eq=False)
class Reshape:
    """A change of shape in place of a tensor subclass, which is made again as it is."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    with_grad: bool


@dataclass(frozen=True)
class PartFacts:
    """What happened to the parts of an input that is a tensor subclass: which of them have new
    values, which were exchanged for others, and the changes of shape in place, to be made again."""

    changed: tuple[int, ...] = ()
    exchanged: tuple[int, ...] = ()
    reshapes: tuple[Reshape, ...] = ()


@dataclass(frozen=True)
class InputFacts:
    """What happened to one input.

    `history_changed`: autograd saw a change, so the update must be made in grad mode.
    `version_bumps`: how often its version counter moved. `adopts`: the input whose memory it took
    over with `set_`. `final_bytes`: the size to which its storage is resized at the end.
    `leaf_meanwhile`: it required grad for a while, and gradients of that time reach it.
    `history_look`: see `Fresh`.
    """

    index: int
    data_changed: bool = False
    geometry: Geometry | None = None
    storage_changed: bool = False
    history_changed: bool = False
    history_dropped: bool = False
    becomes_leaf: bool | None = None
    leaf_meanwhile: bool = False
    version_bumps: int = 0
    adopts: int | None = None
    final_geometry: Geometry | None = None
    old_memory_changed: bool = False
    final_bytes: int | None = None
    parts: PartFacts | None = None
    history_look: Geometry | None = None

    @property
    def untouched(self) -> bool:
        return self == InputFacts(self.index)

    @property
    def only_written(self) -> bool:
        """Does it leave with new values that autograd saw, and is the same tensor in all but a shape that
        autograd has seen, too?"""
        written = self.data_changed and self.history_changed and self.index >= 0
        plain = replace(self, data_changed=False, history_changed=False, version_bumps=0, geometry=None)
        return written and plain.untouched

    @property
    def is_updated(self) -> bool:
        """Does it leave with new values, another shape or other memory?"""
        return self.data_changed or self.geometry is not None or self.storage_changed


@dataclass(frozen=True)
class Step:
    """One view op of a recipe; `part` picks one of several results.

    `without_grad`: it was made under no_grad although others of its recipe were not.
    `in_place`: a change of shape of the view before it.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    part: int | None = None
    without_grad: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Recipe:
    """How to make one alias from another: view ops, or sizes and strides in the same storage.

    `cut` severs the history: "detach" shares the version counter, "data" does not.
    """

    steps: tuple[Step, ...] = ()
    geometry: Geometry | None = None
    cut: str | None = None


# ---- roots: tensors that are not views, in whose storage outputs live ------------------------


@dataclass(frozen=True)
class InputRoot:
    index: int


@dataclass(frozen=True)
class FreshRoot:
    """Made by the program: user output `output`, or an extra base `base`. `apart`: see `Fresh`."""

    output: int | None
    base: int | None
    differentiable: bool = False
    leaf: bool = False
    apart: bool = False


@dataclass(frozen=True)
class AliasRoot:
    """Shares the storage of another root but has a history of its own (after detach, say)."""

    of: int
    recipe: Recipe
    base: int | None = None
    output: int | None = None
    leaf: bool = False


Root = InputRoot | FreshRoot | AliasRoot


# ---- outputs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """Not a tensor."""

    value: Any


@dataclass(frozen=True)
class TheInput:
    """The very tensor object that was passed in."""

    index: int


@dataclass(frozen=True)
class SameAs:
    """The same object as an earlier output."""

    output: int


@dataclass(frozen=True)
class Fresh:
    """Shares memory with nothing else that the caller sees.

    `leaf`: made to require grad inside, without a history. `geometry`: strides to give to the
    program's result where they differ from eager's (in dimensions of size one). `history_look`: what
    autograd takes its size to be, if its shape was changed out of autograd's sight. `apart`: taken with
    `.data` from what nobody else sees: writes to it do not show in the version of what was saved there.
    """

    differentiable: bool
    leaf: bool = False
    is_view: bool = False
    geometry: Geometry | None = None
    history_look: Geometry | None = None
    apart: bool = False


@dataclass(frozen=True)
class IsRoot:
    """One of the roots."""

    root: int


@dataclass(frozen=True)
class ViewOf:
    """A view of a root, made again at run time.

    `without_grad`: made under no_grad. `stale`: its root was changed after it was made, which
    eager remembers. `creation`: an autograd flag to set when the recipe cannot imply it. `through`: the
    output, itself a view of that root, that it is taken from: the first steps are those of that one.
    """

    root: int
    recipe: Recipe
    without_grad: bool = False
    stale: bool = False
    creation: Any = None
    leaf: bool = False
    through: int | None = None

    @property
    def plain(self) -> bool:
        """Made in grad mode, by ops alone: such a view can be made as soon as its root is there."""
        unusual = self.without_grad or self.stale or self.leaf or self.creation is not None
        changes = any(s.without_grad or s.in_place for s in self.recipe.steps)
        return not (unusual or changes or self.recipe.cut is not None)


@dataclass(frozen=True)
class FunctionView:
    """A view returned by a custom autograd.Function: memory of another, history of its own."""

    differentiable: bool


OutputFacts = Constant | TheInput | SameAs | Fresh | IsRoot | ViewOf | FunctionView


@dataclass(frozen=True)
class Facts:
    """What happened in a run; `grad_mode_after` if the function left grad mode changed."""

    inputs: tuple[InputFacts, ...]
    outputs: tuple[OutputFacts, ...]
    roots: tuple[Root, ...]
    grad_mode_after: bool | None = None

    def input(self, index: int) -> InputFacts | None:
        return next((f for f in self.inputs if f.index == index), None)

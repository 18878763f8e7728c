"""What the programs of an export mean: frozen values, enough to run them without what they were made from.

A tensor of a call is known by its `Place`: an argument (by its number among the flat arguments), or one that
the export holds (by name). Programs carry typed slots; the signature says what those stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aheadgrad.codec.kinds import register
from aheadgrad.export.trees import Tree
from aheadgrad.facts.facts import Facts
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Slot
from aheadgrad.program.values import TensorType
from aheadgrad.torchlayer.subclasses import Form


@dataclass(frozen=True)
class Place:
    """Where a tensor of a call is: "argument", "held"; or "memory" and "base", which are all of the memory
    that the tensor `of` lies in, and what it is a view of."""

    kind: str
    of: Any

    def name(self, paths: Sequence[str]) -> str:
        """A held tensor's name, or an argument's path."""
        if isinstance(self.of, Place):
            return f"{self.kind} of {self.of.name(paths)}"
        return str(self.of) if self.kind == "held" else paths[self.of]


@dataclass(frozen=True)
class Held:
    """A tensor that the export holds: a "parameter", a "buffer", a "tensor" that the function closes over, a
    "state" of an optimizer, a "gradient" (the `.grad` of a parameter), or a "constant" of a program.

    `names` are all that it was known by: tied parameters are one tensor. `made`: the call makes it.
    """

    name: str
    kind: str
    type: TensorType | None
    requires_grad: bool = False
    names: tuple[str, ...] = ()
    form: Form | None = None
    made: bool = False


@dataclass(frozen=True)
class Argument:
    """One of the flat arguments. What is no tensor must be `value` again; `same_as` is an argument before it,
    or a held tensor, that it must be; `memory` is the first argument whose memory it lies in."""

    path: str
    memory: int
    type: TensorType | None = None
    requires_grad: bool = False
    form: Form | None = None
    value: Any = None
    same_as: Place | None = None

    @property
    def is_tensor(self) -> bool:
        return self.type is not None or self.form is not None


@dataclass(frozen=True)
class Leaving:
    """One result of the forward; `form` if it is a tensor subclass, which leaves part by part."""

    slot: Slot
    form: Form | None = None


@dataclass(frozen=True)
class GradientOf:
    """A gradient: of the tensor at `place` (None: of a leaf that the function made), called `name`.
    `missing`: it is always None."""

    name: str
    place: Place | None
    form: Form | None = None
    missing: bool = False


@dataclass(frozen=True)
class TangentOf:
    """A tangent that a backward takes: of the result `leaving`."""

    leaving: int
    type: TensorType | None
    form: Form | None = None


@dataclass(frozen=True)
class Backward:
    """What a backward (or the second half of a joint program) takes and gives."""

    tangents: tuple[TangentOf, ...]
    gradients: tuple[GradientOf, ...]


@dataclass(frozen=True)
class Size:
    """A size that may be any: the symbol, and where it is read: `dimension` of the argument `argument`;
    `name` is what the user calls it."""

    symbol: str
    argument: int
    dimension: int
    name: str = ""


@dataclass(frozen=True)
class CallSignature:
    """`kind` is "forward", "joint" or "split".

    `inputs` are the tensors that a call is about, and `taken` those of them, by index, that the first program
    takes (subclasses part by part); held `constants` come last in each program. `members` are tensors that
    lie in the memory of an input, which the program takes in their place (facts count them down from -1).

    `leaving` are the results, in order; `updates` and `old_memory` tell which input, by index, has which of
    them as its new value, and as what its former memory holds. Some held tensors may be there or not (state
    of optimizers, gradients): of those `finds` are there when a call begins, it makes `made` (out of which
    flat output of the facts), and `gone` are there no longer when it ends. `renewed` tells of held
    tensors which output is there in their place from then on.
    `facts` tell how results and updates share memory. `outputs` are the paths of what the function returns,
    and `loss` the number of the one that gradients are of. `exact_memory`: strides and offsets of arguments
    have to be as they were; otherwise they may be any. `numbers` are outputs that programs give as tensors,
    and the function as numbers (`loss.item()`).
    """

    kind: str
    held: tuple[Held, ...]
    arguments: tuple[Argument, ...]
    inputs: tuple[Place, ...]
    taken: tuple[int, ...]
    members: tuple[Place, ...]
    constants: tuple[tuple[str, ...], ...]
    leaving: tuple[Leaving, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[int, int], ...]
    old_memory: tuple[tuple[int, int], ...]
    finds: tuple[str, ...]
    made: tuple[tuple[str, int], ...]
    renewed: tuple[tuple[str, int], ...]
    gone: tuple[str, ...]
    backwards: tuple[Backward, ...]
    loss: int | None
    takes: Tree
    returns: Tree
    facts: Facts
    sizes: tuple[Size, ...] = ()
    conditions: tuple[Any, ...] = ()
    exact_memory: bool = False
    numbers: tuple[int, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.held_as("parameter")

    @property
    def buffers(self) -> tuple[str, ...]:
        return self.held_as("buffer")

    @property
    def user_inputs(self) -> tuple[str, ...]:
        """The arguments that are tensors, by path."""
        return tuple(a.path for a in self.arguments if a.is_tensor)

    @property
    def updated(self) -> tuple[str, ...]:
        """What the call changes: names of held tensors, and paths of arguments."""
        changed = (self.name_of(self.place(f.index)) for f in self.facts.inputs if f.is_updated)
        return (*changed, *(name for name, _ in self.renewed))

    @property
    def gradients(self) -> tuple[str, ...]:
        """What there are gradients of."""
        return tuple(g.name for b in self.backwards for g in b.gradients if not g.missing)

    def held_as(self, kind: str) -> tuple[str, ...]:
        return tuple(h.name for h in self.held if h.kind == kind)

    def place(self, index: int) -> Place:
        """Of an input, by its index in the facts."""
        return self.inputs[index] if index >= 0 else self.members[-1 - index]

    def name_of(self, place: Place) -> str:
        return place.name([a.path for a in self.arguments])


@dataclass(frozen=True, eq=False)
class Stage:
    """The programs of one kind of call: one (forward or joint), or a forward and its backwards."""

    programs: tuple[Program, ...]
    signature: CallSignature


register(Tree, Place, Held, Argument, Leaving, GradientOf, TangentOf, Backward, Size, CallSignature, Stage)

"""Typed slots: what each input and output of a program means.

A program never says "outputs 2 to 4 are updated inputs"; it carries one slot per position:

    Signature(inputs=(Parameter("weight"), UserInput("x")), outputs=(UserOutput(0), Saved("weight")))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from aheadgrad.torchlayer.subclasses import Bundle


@dataclass(frozen=True)
class Slot:
    """Common base; `describe()` is what people read, made from the `text` of a kind and its fields."""

    text: ClassVar[str] = "a value"

    def describe(self) -> str:
        words = {k: v.describe() if isinstance(v, Slot) else v for k, v in vars(self).items()}
        return self.text.format(**words)


# ---- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter(Slot):
    text = "parameter {name}"
    name: str


@dataclass(frozen=True)
class Buffer(Slot):
    text = "buffer {name}"
    name: str


@dataclass(frozen=True)
class UserInput(Slot):
    text = "input {path}"
    path: str


@dataclass(frozen=True)
class ClosedOver(Slot):
    """A tensor that the function reached without being given it."""

    text = "closed-over tensor {what}"
    what: str


@dataclass(frozen=True)
class SharedBase(Slot):
    """The common base of inputs that share memory, in place of those inputs."""

    text = "base shared by {members}"
    members: str


@dataclass(frozen=True)
class Tangent(Slot):
    text = "tangent of {of}"
    of: Slot


# ---- outputs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdatedInput(Slot):
    text = "new value of {of}"
    of: Slot


@dataclass(frozen=True)
class OldMemory(Slot):
    """What the memory holds that an input had before `set_` gave it another."""

    text = "new content of the former memory of {of}"
    of: Slot


@dataclass(frozen=True)
class UserOutput(Slot):
    text = "output {index}"
    index: int


@dataclass(frozen=True)
class ViewBase(Slot):
    """An intermediate that outputs are views of (or share memory with)."""

    text = "base {index} of output views"
    index: int


@dataclass(frozen=True)
class Between(Slot):
    """An intermediate at which one backward hands over to another; no result of any program."""

    text = "intermediate {index} between two backwards"
    index: int


@dataclass(frozen=True)
class Gradient(Slot):
    text = "gradient of {of}"
    of: Slot


@dataclass(frozen=True)
class NoGradient(Slot):
    """Stands where an input has no gradient, in graphs that return one per input: always None."""

    text = "no gradient of {of}"
    of: Slot


@dataclass(frozen=True)
class Saved(Slot):
    """A value that the forward keeps for the backward."""

    name: str
    reason: str = ""

    def describe(self) -> str:
        return f"saved {self.name}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class RandomState(Saved):
    """The state of a generator before a random op, so that it can be run again with the same numbers."""

    def describe(self) -> str:
        return f"state of the generator before {self.name.removesuffix('_state')}"


@dataclass(frozen=True)
class SavedSize(Slot):
    """A number that the forward keeps for the backward."""

    text = "saved size {name}"
    name: str


@dataclass(frozen=True)
class Part(Slot):
    """One of the plain tensors inside a tensor subclass."""

    text = "part {index} of {of}"
    of: Slot
    index: int


def opened(values: Iterable[tuple[Slot, Any]]) -> list[tuple[Slot, Any]]:
    """The same values with tensor subclasses taken apart: programs take and return plain tensors."""
    found: list[tuple[Slot, Any]] = []
    for slot, value in values:
        if type(value) is Bundle:
            found += ((Part(slot, k), part) for k, part in enumerate(value.parts))
        else:
            found.append((slot, value))
    return found


@dataclass(frozen=True)
class Signature:
    """One slot per placeholder and per output of a program, in order."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def outputs_of(self, kind: type[Slot]) -> list[int]:
        return [i for i, slot in enumerate(self.outputs) if isinstance(slot, kind)]

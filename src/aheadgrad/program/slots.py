"""Typed slots: what each input and output of a program means.

A program never says "outputs 2 to 4 are updated inputs"; it carries one slot per position:

    Signature(inputs=(Parameter("weight"), UserInput("x")), outputs=(UserOutput(0), Saved("weight")))
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Common base; `describe()` is what people read."""

    def describe(self) -> str:
        return type(self).__name__


# ---- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter(Slot):
    name: str

    def describe(self) -> str:
        return f"parameter {self.name}"


@dataclass(frozen=True)
class Buffer(Slot):
    name: str

    def describe(self) -> str:
        return f"buffer {self.name}"


@dataclass(frozen=True)
class UserInput(Slot):
    path: str

    def describe(self) -> str:
        return f"input {self.path}"


@dataclass(frozen=True)
class ClosedOver(Slot):
    """A tensor that the function reached without being given it."""

    what: str

    def describe(self) -> str:
        return f"closed-over tensor {self.what}"


@dataclass(frozen=True)
class SharedBase(Slot):
    """The common base of inputs that share memory, in place of those inputs."""

    members: tuple[str, ...]

    def describe(self) -> str:
        return f"base shared by {', '.join(self.members)}"


@dataclass(frozen=True)
class Tangent(Slot):
    of: Slot

    def describe(self) -> str:
        return f"tangent of {self.of.describe()}"


# ---- outputs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdatedInput(Slot):
    of: Slot

    def describe(self) -> str:
        return f"new value of {self.of.describe()}"


@dataclass(frozen=True)
class OldMemory(Slot):
    """What the memory holds that an input had before `set_` gave it another."""

    of: Slot

    def describe(self) -> str:
        return f"new content of the former memory of {self.of.describe()}"


@dataclass(frozen=True)
class UserOutput(Slot):
    index: int

    def describe(self) -> str:
        return f"output {self.index}"


@dataclass(frozen=True)
class ViewBase(Slot):
    """An intermediate that outputs are views of (or share memory with)."""

    index: int

    def describe(self) -> str:
        return f"base {self.index} of output views"


@dataclass(frozen=True)
class Between(Slot):
    """An intermediate at which one backward hands over to another; no result of any program."""

    index: int

    def describe(self) -> str:
        return f"intermediate {self.index} between two backwards"


@dataclass(frozen=True)
class Gradient(Slot):
    of: Slot

    def describe(self) -> str:
        return f"gradient of {self.of.describe()}"


@dataclass(frozen=True)
class NoGradient(Slot):
    """Stands where an input has no gradient, in graphs that return one per input: always None."""

    of: Slot

    def describe(self) -> str:
        return f"no gradient of {self.of.describe()}"


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

    name: str

    def describe(self) -> str:
        return f"saved size {self.name}"


@dataclass(frozen=True)
class Part(Slot):
    """One of the plain tensors inside a tensor subclass."""

    of: Slot
    index: int

    def describe(self) -> str:
        return f"part {self.index} of {self.of.describe()}"


def parts(slot: Slot, count: int) -> list[Slot]:
    """The slots of a value that is taken apart."""
    return [Part(slot, k) for k in range(count)]


@dataclass(frozen=True)
class Signature:
    """One slot per placeholder and per output of a program, in order."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def outputs_of(self, kind: type[Slot]) -> list[int]:
        return [i for i, slot in enumerate(self.outputs) if isinstance(slot, kind)]

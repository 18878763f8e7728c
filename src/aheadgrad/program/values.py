"""Values and ops: what programs are made of.

A value is a number with a type; an op names the values that it takes and makes:

    %3 mul: f32[2, 3] = aten.mul.Tensor(%0, %1)

Values are told apart by identity. One value stands for the same tensor in every program of a recording, which
is how a forward and its backwards know of each other.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from aheadgrad.program.slots import Slot
from aheadgrad.torchlayer.autograd import AutogradNode
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.symbols import Number, shown_by

T = TypeVar("T")
Shown = tuple[Any, tuple[Any, ...], Any]


@dataclass(frozen=True, slots=True)
class TensorType:
    """What a tensor looks like. Sizes, strides and the offset are numbers, or symbolic ones."""

    dtype: torch.dtype
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    device: torch.device
    layout: torch.layout = torch.strided
    conj: bool = False
    neg: bool = False

    def shown(self, *, strides: bool = True) -> list[Shown]:
        """Where the tensor shows symbolic numbers: `(op, further arguments, number)`, sizes first. A backend
        may give what it makes other `strides`."""
        laid_out = strides and self.layout is torch.strided
        return shown_by(self.size, self.stride if laid_out else None, self.offset)

    @property
    def bytes(self) -> Any:
        """How much memory its elements take, as a number of the recorded call."""
        count = self.dtype.itemsize
        for n in self.size:
            count *= n.hint or 0 if type(n) is Number else n
        return count

    @property
    def numbers(self) -> tuple[Any, ...]:
        return (*self.size, *self.stride, self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor of a recording; `op` is the number of the op that made it, `part` which of its results."""

    number: int
    type: TensorType
    name: str = ""
    op: int | None = None
    part: int | None = None

    def __repr__(self) -> str:
        return self.name or f"input_{self.number}"

    def size(self) -> tuple[Any, ...]:
        return self.type.size

    def stride(self) -> tuple[Any, ...]:
        return self.type.stride


class Origin(NamedTuple):
    """The user's line that an op came from."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} in {self.function}"

    @property
    def place(self) -> str:
        """As an editor finds it."""
        return f"{self.file}:{self.line}, in {self.function}"

    def as_traceback(self) -> str:
        """The line as Python's tracebacks show it."""
        code = linecache.getline(self.file, self.line).strip()
        return f'  File "{self.file}", line {self.line}, in {self.function}\n    {code}\n'


class Region(NamedTuple):
    """A part of the function that its author wants to run again in the backward (`torch.utils.checkpoint`);
    `saves`: but not this op."""

    number: int
    saves: bool


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One op. `out` is a value, a number, a tuple of such, or None; real tensors in `args` are constants.

    `phase` tells when it ran: "forward", "backward 3"; "write" for an update that a program makes itself, ""
    for one that reads a size. `keep`: it has an effect. `node`: whose backward it ran in. `region`: where it
    belongs to; an op of a backward is in the region whose op it differentiates.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    uses: tuple[Value, ...]
    name: str
    phase: str = ""
    keep: bool = False
    origin: Origin | None = None
    node: AutogradNode | None = None
    meta: Mapping[str, Any] | None = field(default=None, repr=False)
    region: Region | None = None

    @property
    def outs(self) -> tuple[Any, ...]:
        """The results one by one."""
        return self.out if type(self.out) is tuple else (self.out,)

    @property
    def values(self) -> Iterator[Value]:
        """The tensors among the results."""
        return (v for v in self.outs if type(v) is Value)

    @property
    def viewed(self) -> Value | None:
        """The value that the results of a view op share memory with."""
        is_view = self.uses and is_view_op(self.target) and type(self.args[0]) is Value
        return self.args[0] if is_view else None

    def mapped(self, change: Callable[[Any], Any]) -> Op:
        """The same op with values and numbers among its arguments exchanged."""
        args, kwargs = map_leaves(self.args, change), map_leaves(self.kwargs, change)
        return replace(self, args=args, kwargs=kwargs, uses=tuple(values_in((args, kwargs))))


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments with `change` applied to values and symbolic numbers, at any depth."""
    if type(value) is Value or type(value) is Number:
        return change(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map_leaves(v, change) for v in value)
    if isinstance(value, dict):
        return {k: map_leaves(v, change) for k, v in value.items()}
    return value


def leaves_in(value: Any, kind: type[T]) -> Iterator[T]:
    """Those of one kind among arguments, at any depth and in order."""
    if type(value) is kind:
        yield value
    elif isinstance(value, list | tuple | dict):
        for v in value.values() if isinstance(value, dict) else value:
            yield from leaves_in(v, kind)


def values_in(value: Any) -> Iterator[Value]:
    return leaves_in(value, Value)


def numbers_in(value: Any) -> Iterator[Number]:
    return leaves_in(value, Number)


def free_symbols(values: Any) -> set[Any]:
    """The symbols in the types of values, and in numbers."""
    found: set[Any] = set()
    for v in values:
        numbers = v.type.numbers if type(v) is Value else (v,)
        found = found.union(*(n.expr.free_symbols for n in numbers if type(n) is Number))
    return found


@dataclass(frozen=True, eq=False)
class Port:
    """An input of a program: its meaning, the value (or number, or constant) it stands for, its name.

    `static`: it stays where it is from call to call.
    """

    slot: Slot
    value: Any
    name: str
    static: bool = False


@dataclass(frozen=True, eq=False)
class FreshCopy:
    """Uses of an input go through a copy of it (`clone`) or an alias (`view`)."""

    value: Value
    target: Any
    name: str

    @property
    def args(self) -> tuple[Any, ...]:
        return (list(self.value.type.size),) if self.target is torch.ops.aten.view.default else ()


@dataclass(frozen=True, eq=False)
class Write:
    """An input's update kept inside the graph: `target(value, new)` after all that reads the old value."""

    target: Any
    value: Value
    new: Value


@dataclass(frozen=True, eq=False)
class Written:
    """As an output: the input after the write that the graph makes."""

    value: Value

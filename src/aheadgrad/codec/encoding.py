"""Stage values as plain data: lists, strings and numbers that JSON can hold, and the tensors beside them.

    encoded = encode(split)
    encoded.text()               # the same for the same program
    decode(encoded)              # another one, equal

The data is a flat list of objects, each a row of its kind and its fields, in which an object comes after all
that it refers to. So one value that many ops use stays one, and nothing refers to itself:

    {"kinds": [["TensorType", "dtype", ...], ["Value", "number", "type", ...], ...],
     "objects": [[0, ["dtype", "float32"], ["tuple", 3], ...], [1, 0, [0], "x", null, null], ...],
     "root": [17]}

In a field `[17]` is object 17, `["tuple", 1, 2]` a tuple; strings, numbers, truth values and None are
themselves. `docs/format.md` lists the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.codec.kinds import BY_TYPE
from aheadgrad.errors import ArtifactError
from aheadgrad.options import Options
from aheadgrad.program.doors import program_of_body
from aheadgrad.program.names import Naming
from aheadgrad.program.values import Op, Origin, values_in
from aheadgrad.torchlayer import expressions
from aheadgrad.torchlayer.autograd import AutogradNode, CreationMeta
from aheadgrad.torchlayer.named import op_name, reshape_name
from aheadgrad.torchlayer.subclasses import is_plain
from aheadgrad.torchlayer.symbols import Shape

OP = ("target", "args", "kwargs", "out", "name", "phase", "keep", "origin", "node", "region")
OPTIONS = tuple(f.name for f in fields(Options) if f.name not in ("decompositions", "cache"))
SPECIAL: dict[str, tuple[str, ...]] = {
    "Op": OP,
    "Origin": Origin._fields,
    "Options": OPTIONS,
    "Naming": ("sizes", "writes"),
    "Body": ("program", "single"),
    "operator": ("name",),
    "symbol": ("name", "is", "is_not"),
    "expression": ("head", "args"),
    "error": ("kind", "message"),
}
"""The kinds whose fields are not simply those of a class."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """`tree` is for JSON; it refers to `tensors` by their place."""

    tree: Any
    tensors: tuple[Tensor, ...] = ()

    def text(self) -> str:
        return json.dumps(self.tree, separators=(",", ":"), allow_nan=False)


def encode(value: Any) -> Encoded:
    """Anything made of stage values; ArtifactError names what cannot be written, and where it is."""
    writer = _Writer()
    try:
        root = writer.value(value)
    except _Unwritable as error:
        where = " of ".join(error.where) or "the value itself"
        raise ArtifactError(f"{error.what} cannot be written to a file (it is in {where}).") from None
    except RecursionError:
        raise ArtifactError("This is nested too deeply to be written to a file.") from None
    kinds = [[name, *names] for name, names in writer.kinds.values()]
    return Encoded({"kinds": kinds, "objects": writer.objects, "root": root}, tuple(writer.tensors))


class _Unwritable(Exception):
    def __init__(self, what: str) -> None:
        self.what = what
        self.where: list[str] = []


class _Writer:
    def __init__(self) -> None:
        self.kinds: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.objects: list[list[Any]] = []
        self.tensors: list[Tensor] = []
        self._numbers: dict[str, int] = {}  # of kinds, by name
        self._known: dict[int, list[int]] = {}  # by id: the reference to an object
        self._kept: list[Any] = []  # so that ids stay theirs
        self._equal: dict[str, list[int]] = {}  # by content
        self._places: dict[int, int] = {}  # of tensors, by id
        self._nodes: dict[int, int] = {}  # numbers of autograd nodes, which grow with each run

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            return value
        write = _WRITE.get(kind)
        if write is not None:
            return write(self, value)
        known = self._known.get(id(value))
        return self._object(value) if known is None else known

    def values(self, values: Any) -> list[Any]:
        return [self.value(v) for v in values]

    def _object(self, value: Any) -> Any:
        kind = BY_TYPE.get(type(value))
        special = _SPECIAL.get(type(value))
        if special is not None:
            made = special(self, value)
        elif kind is not None:
            made = self.row(kind.name, kind.fields, kind.take(value), value, shared=kind.shared)
        else:
            return _other(self, value)
        self._known[id(value)] = made
        self._kept.append(value)
        return made

    def row(
        self, name: str, names: tuple[str, ...], parts: tuple[Any, ...], of: Any, *, shared: bool
    ) -> list[int]:
        """A new object of these fields, or the one that is equal to it."""
        row: list[Any] = []
        try:
            for part in parts:
                row.append(self.value(part))
        except _Unwritable as error:
            called = getattr(of, "name", None)
            shown = f" {called}" if isinstance(called, str) else ""
            error.where.append(f"{names[len(row)]} of {name}{shown}")
            raise
        return self.put(name, names, row, shared=shared)

    def put(self, name: str, names: tuple[str, ...], row: list[Any], *, shared: bool) -> list[int]:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.kinds)
            self.kinds[name] = name, names
        row.insert(0, number)
        key = repr(row) if shared else ""
        if shared and key in self._equal:
            return self._equal[key]
        made = [len(self.objects)]
        self.objects.append(row)
        if shared:
            self._equal[key] = made
        return made

    def tensor(self, t: Tensor) -> list[Any]:
        if not is_plain(t) or t.layout is not torch.strided or t.is_quantized or t.device.type == "meta":
            raise _Unwritable(f"A constant that is a {type(t).__name__} ({t.layout}, {t.device})")
        place = self._places.get(id(t))
        if place is None:
            place = self._places[id(t)] = len(self.tensors)
            self.tensors.append(t)
        return ["tensor", place]

    def node(self, node: AutogradNode) -> list[int]:
        number = self._nodes.setdefault(node.number, len(self._nodes))
        return self.put("AutogradNode", node._fields, [node.name, number], shared=True)

    def op(self, op: Op) -> list[int]:
        if op.uses != tuple(values_in((op.args, op.kwargs))):
            raise _Unwritable(f"The op {op.name}, which uses values that are none of its arguments,")
        flat = tuple(x for pair in op.kwargs.items() for x in pair)
        parts = op.target, op.args, flat, op.out, op.name, op.phase, op.keep, op.origin, op.node, op.region
        return self.row("Op", OP, parts, op, shared=False)

    def expression(self, expr: Any) -> list[int]:
        try:
            if expressions.is_symbol(expr):
                name, is_, is_not = expressions.symbol_parts(expr)
                row: list[Any] = [name, list(is_), list(is_not)]
                return self.put("symbol", SPECIAL["symbol"], row, shared=True)
            head, args = expressions.parts(expr)
        except ValueError as error:
            raise _Unwritable(f"The size {expr} ({error})") from None
        return self.put("expression", SPECIAL["expression"], [head, self.values(args)], shared=True)


def _tagged(tag: str, write: Callable[[Any], Any] = str) -> Callable[[_Writer, Any], Any]:
    return lambda writer, value: [tag, write(value)]


def _several(tag: str) -> Callable[[_Writer, Any], Any]:
    return lambda writer, value: [tag, *writer.values(value)]


def _unprefixed(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _float(writer: _Writer, value: float) -> Any:
    return value if math.isfinite(value) else ["float", repr(value)]


def _complex(writer: _Writer, value: complex) -> Any:
    return ["complex", _float(writer, value.real), _float(writer, value.imag)]


def _dict(writer: _Writer, value: dict[Any, Any]) -> Any:
    return ["dict", *writer.values(x for pair in value.items() for x in pair)]


def _frozenset(writer: _Writer, value: frozenset[Any]) -> Any:
    return ["frozenset", *sorted(writer.values(value), key=repr)]


def _slice(writer: _Writer, value: slice) -> Any:
    return ["slice", *writer.values((value.start, value.stop, value.step))]


_WRITE: dict[type, Callable[[_Writer, Any], Any]] = {
    float: _float,
    complex: _complex,
    tuple: _several("tuple"),
    list: _several("list"),
    torch.Size: _several("size"),
    Shape: _several("shape"),
    dict: _dict,
    frozenset: _frozenset,
    slice: _slice,
    bytes: _tagged("bytes", bytes.hex),
    type(...): lambda writer, value: ["ellipsis"],
    torch.dtype: _tagged("dtype", _unprefixed),
    torch.layout: _tagged("layout", _unprefixed),
    torch.memory_format: _tagged("memory_format", _unprefixed),
    torch.device: _tagged("device"),
    CreationMeta: _tagged("creation", lambda value: value.name),
}


def _origin(writer: _Writer, origin: Origin) -> list[int]:
    """Without the way to the file, which is a matter of the machine."""
    file = origin.file.replace("\\", "/").rsplit("/", 1)[-1]
    return writer.put("Origin", origin._fields, [file, origin.line, origin.function], shared=True)


def _options(writer: _Writer, options: Options) -> list[int]:
    """Without what only a process has: a backend or a partition function of the caller's own."""
    given: dict[str, Any] = {name: getattr(options, name) for name in OPTIONS}
    for name in ("backend", "partition"):
        given[name] = given[name] if isinstance(given[name], str) else "default"
    return writer.row("Options", OPTIONS, tuple(given.values()), options, shared=True)


def _naming(writer: _Writer, naming: Naming) -> list[int]:
    return writer.row("Naming", SPECIAL["Naming"], (naming.sizes, naming.writes), naming, shared=False)


_SPECIAL: dict[type, Callable[[_Writer, Any], Any]] = {
    Op: _Writer.op,
    AutogradNode: _Writer.node,
    Origin: _origin,
    Options: _options,
    Naming: _naming,
}


def _other(writer: _Writer, value: Any) -> Any:
    """What is known by more than its type."""
    if isinstance(value, Tensor):
        return writer.tensor(value)
    if expressions.is_expression(value):
        return writer.expression(value)
    name = op_name(value)
    if name is not None:
        return writer.put("operator", SPECIAL["operator"], [name], shared=True)
    if isinstance(value, fx.GraphModule):
        single = not isinstance(value.graph.output_node().args[0], list | tuple)
        return writer.row("Body", SPECIAL["Body"], (_body(value), single), value, shared=False)
    if isinstance(value, type):
        return _class(value)
    if type(value) in ERRORS.values():
        return writer.put("error", SPECIAL["error"], [type(value).__name__, str(value)], shared=False)
    name = reshape_name(value)
    if name is not None:
        return ["reshape", name]
    text = str(value)[:80]
    shown = f" ({text})" if " at 0x" not in text else ""
    raise _Unwritable(f"A {type(value).__module__}.{type(value).__qualname__}{shown}")


def _class(kind: type) -> Any:
    if kind in NUMBERS.values():
        return ["type", kind.__name__]
    if issubclass(kind, Tensor) and "<locals>" not in kind.__qualname__:
        return ["class", kind.__module__, kind.__qualname__]
    raise _Unwritable(f"The class {kind.__module__}.{kind.__qualname__}")


def _body(module: fx.GraphModule) -> Any:
    """The graph of a function that a control-flow operator runs, as a program."""
    try:
        return program_of_body(module)
    except Exception as error:
        raise _Unwritable(f"The function of a control-flow operator ({error})") from error


NUMBERS: dict[str, type] = {"int": int, "float": float, "bool": bool}
ERRORS: dict[str, type[Exception]] = {
    e.__name__: e
    for e in (RuntimeError, ValueError, TypeError, IndexError, KeyError, NotImplementedError, AssertionError)
}

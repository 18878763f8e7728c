"""Plain data as stage values: the way back of `encoding`.

Nothing here imports, evaluates or calls what a file names: objects are of the kinds in the closed table, ops
are looked up among those that this process has. What the annotations of a kind say is checked, and so is what
has to be true of it besides (`checks`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from aheadgrad.codec.checks import CHECKS, bundle, identifier
from aheadgrad.codec.encoding import ERRORS, NUMBERS, SPECIAL, Encoded
from aheadgrad.codec.kinds import KINDS, Kind
from aheadgrad.codec.sound import check_extent, check_sound, check_trust
from aheadgrad.errors import AheadgradError, ArtifactError
from aheadgrad.options import Options
from aheadgrad.program.check import check
from aheadgrad.program.collection import no_collection
from aheadgrad.program.names import Naming
from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Origin, Region, Value, values_in
from aheadgrad.torchlayer import expressions
from aheadgrad.torchlayer.autograd import AutogradNode
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, OpOverload
from aheadgrad.torchlayer.named import (
    CREATIONS,
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    RESHAPES,
    named_op,
    tensor_class,
)
from aheadgrad.torchlayer.replay import Drawn, Replayed
from aheadgrad.torchlayer.subclasses import Bundle
from aheadgrad.torchlayer.symbols import Number, Shape

_DEEPEST = 32
_PLAIN = frozenset((str, int, bool, type(None)))
_OPS = (OpOverload, HigherOrderOperator, Drawn, Replayed)
_NOTES = ((Origin, type(None)), (AutogradNode, type(None)), (Region, type(None)))
_NESTED = (list, tuple, dict)


@no_collection()
def decode(encoded: Encoded, trust: Collection[str] | None = None) -> Any:
    """What was encoded; ArtifactError for anything that `encode` would not have given.

    With `trust` it may come from anybody: all of it is checked, and ops are torch's own or in one of these
    namespaces.
    """
    reader = _Reader(encoded, trust)
    try:
        return reader.read(encoded.tree)
    except ArtifactError as error:
        raise ArtifactError(f"{error}{reader.where()}") from None
    except (AheadgradError, ValueError, TypeError, RuntimeError, KeyError, OverflowError) as error:
        raise ArtifactError(f"The data makes no sense: {error}{reader.where()}") from error


@no_collection()
def parsed(text: str | bytes) -> Any:
    """The tree that a text stands for; ArtifactError if it is not what `Encoded.text` writes."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twice)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"This is no JSON as aheadgrad writes it: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a key twice")
    return made


class _Reader:
    def __init__(self, encoded: Encoded, trust: Collection[str] | None) -> None:
        self.tensors = encoded.tensors
        self.trust = trust
        self.objects: list[Any] = []
        self.names: list[str] = []  # of all ops and values
        self.kind = ""

    def where(self) -> str:
        return f" (object {len(self.objects)}: {self.kind})" if self.kind else ""

    def read(self, tree: Any) -> Any:
        if type(tree) is not dict or list(tree) != ["kinds", "objects", "root"]:
            raise ArtifactError("This is no data of programs: kinds, objects and a root are expected.")
        if type(tree["kinds"]) is not list or type(tree["objects"]) is not list:
            raise ArtifactError("This is no data of programs: kinds and objects are lists.")
        kinds = [_maker(k) for k in tree["kinds"]]
        objects, strict = self.objects, self.trust is not None
        if strict:
            check_extent(tree["objects"])
        for row in tree["objects"]:
            if type(row) is not list or not row or type(row[0]) is not int or not 0 <= row[0] < len(kinds):
                raise ArtifactError("An object is no row that begins with its kind.")
            self.kind, count, make = kinds[row[0]]
            if len(row) != count:
                raise ArtifactError("An object has too many fields, or too few.")
            made = make(self, row)
            if strict:
                check_sound(made)
            objects.append(made)
        self.kind = ""
        return self.value(tree["root"])

    def value(self, data: Any, depth: int = 0) -> Any:
        kind = type(data)
        if kind in _PLAIN:
            return data
        if kind is list and data:
            head = data[0]
            if type(head) is int:
                if len(data) == 1 and 0 <= head < len(self.objects):
                    return self.objects[head]
                raise ArtifactError(f"{str(data)[:80]} is no object that came before.")
            if depth > _DEEPEST:
                raise ArtifactError("The data is nested too deeply.")
            read = _READ.get(head) if type(head) is str else None
            if read is not None:
                return read(self, data, depth + 1)
        elif kind is float and math.isfinite(data):
            return data
        raise ArtifactError(f"{str(data)[:80]} is no value.")

    def values(self, data: list[Any], depth: int = 0) -> list[Any]:
        value, objects = self.value, self.objects
        count = len(objects)
        found = []
        for d in data:
            kind = type(d)
            if kind is list and len(d) == 1 and type(i := d[0]) is int and 0 <= i < count:
                found.append(objects[i])
            else:
                found.append(d if kind in _PLAIN else value(d, depth))
        return found

    def list(self, data: Any) -> list[Any]:
        """A list that stands where nothing else can."""
        if type(data) is not list:
            raise ArtifactError(f"{str(data)[:80]} is no list.")
        return self.values(data)


_Make = Callable[[_Reader, list[Any]], Any]


def _maker(described: Any) -> tuple[str, int, _Make]:
    """A kind's name, how long its rows are, and what makes an object of one."""
    if type(described) is not list or not described or not all(type(d) is str for d in described):
        raise ArtifactError("A kind is no list of names.")
    name, *names = described
    known = KINDS.get(name)
    expected = known.fields if known is not None else SPECIAL.get(name)
    if expected is None:
        raise ArtifactError(f"There is no kind of object called {name[:80]!r}.")
    if list(expected) != names:
        raise ArtifactError(
            f"A {name} has the fields {', '.join(expected)}; the file has {', '.join(names)[:200]}. It was "
            "written by another version of aheadgrad: write it again with this one."
        )
    return name, len(described), _MAKE[name] if known is None else _of_kind(known)


def _of_kind(kind: Kind) -> _Make:
    make, check, is_value = kind.make, CHECKS.get(kind.kind), kind.kind is Value
    tests = [(k, test) for k, test in enumerate(kind.tests) if test is not None]

    def made(reader: _Reader, row: list[Any]) -> Any:
        parts = reader.values(row[1:])
        for k, test in tests:
            if not test(parts[k]):
                raise ArtifactError(
                    f"{str(parts[k])[:80]!r} is nothing for {kind.fields[k]} of a {kind.name}."
                )
        made = make(*parts)
        if check is not None:
            check(made)
        if is_value:
            reader.names.append(made.name)
        return made

    return made


# ---- kinds whose fields are not simply those of a class --------------------------------------


def _op(reader: _Reader, row: list[Any]) -> Op:
    _, target, args, kwargs, out, name, phase, keep, origin, node, region = row
    target, out, origin, node, region = reader.values([target, out, origin, node, region])
    identifier(name)
    if not isinstance(target, _OPS):
        raise ArtifactError(f"{str(target)[:80]} is no op.")
    if not all(type(a) is list and a[:1] == ["tuple"] for a in (args, kwargs)):
        raise ArtifactError(f"The arguments of {name} are no list.")
    values = tuple(reader.values(args[1:]))
    named = _pairs(reader, kwargs[1:]) if len(kwargs) > 1 else {}
    for key in named:
        identifier(key)
    told = type(phase) is str and type(keep) is bool
    if not told or not all(map(isinstance, (origin, node, region), _NOTES)):
        raise ArtifactError(f"What is told of {name} is of the wrong types.")
    reader.names.append(name)
    uses = _used(values, named)
    return Op(target, values, named, out, uses, name, phase, keep, origin, node, None, region)


def _used(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Value, ...]:
    found: list[Value] = []
    for value in (*args, *kwargs.values()):
        if type(value) is Value:
            found.append(value)
        elif isinstance(value, _NESTED):
            found += values_in(value)
    return tuple(found)


def _origin(reader: _Reader, row: list[Any]) -> Origin:
    _, file, line, function = row
    if type(file) is not str or type(line) is not int or type(function) is not str or "/" in file:
        raise ArtifactError("An origin is the name of a file, a line and a function.")
    return Origin(file, line, function)


def _options(reader: _Reader, row: list[Any]) -> Options:
    given = dict(zip(SPECIAL["Options"], reader.values(row[1:]), strict=True))
    for name in ("backend", "partition", "mode"):
        if not isinstance(given[name], str | None):
            raise ArtifactError(f"{name}={str(given[name])[:80]} is no option.")
    return Options(**given)


def _naming(reader: _Reader, row: list[Any]) -> Naming:
    sizes, writes = reader.values(row[1:])
    if type(sizes) is not dict or type(writes) is not dict:
        raise ArtifactError("Names of sizes and updates are no mappings.")
    for name in (*sizes.values(), *writes.values()):
        identifier(name)
        reader.names.append(name)
    if not all(map(expressions.is_expression, sizes)) or not all(type(v) is Value for v in writes):
        raise ArtifactError("Names are of sizes, and of updates of values.")
    return Naming(sizes, writes, reader.names)


def _bundle(reader: _Reader, row: list[Any]) -> Bundle:
    made = Bundle(*reader.values(row[1:]))
    bundle(made)
    return made


def _body(reader: _Reader, row: list[Any]) -> Any:
    program, single = reader.values(row[1:])
    if type(program) is not Program or type(single) is not bool:
        raise ArtifactError("The function of a control-flow operator is no program.")
    module = check(program).module
    if single:
        last = module.graph.output_node()
        last.args = (last.all_input_nodes[0],)  # the only result by itself
        module.recompile()
    return module


def _operator(reader: _Reader, row: list[Any]) -> Any:
    if type(row[1]) is not str:
        raise ArtifactError("The name of an op is no text.")
    try:
        op = named_op(row[1])
        if reader.trust is not None:
            check_trust(op, reader.trust)
        return op
    except NameError:
        raise ArtifactError(
            f"There is no op called {row[1][:80]!r} here: import what registers it before you load the file."
        ) from None


def _symbol(reader: _Reader, row: list[Any]) -> Any:
    _, name, is_, is_not = row
    texts = [name, *reader.list(is_), *reader.list(is_not)]
    if not all(type(t) is str for t in texts):
        raise ArtifactError("A symbol is a name and what is known of it.")
    return expressions.symbol(name, is_, is_not)


def _expression(reader: _Reader, row: list[Any]) -> Any:
    if type(row[1]) is not str:
        raise ArtifactError("The head of an expression is no text.")
    return expressions.expression(row[1], reader.list(row[2]))


def _error(reader: _Reader, row: list[Any]) -> Exception:
    return _chosen(ERRORS, row[1])(str(row[2]))


_MAKE: dict[str, _Make] = {
    "Op": _op,
    "Origin": _origin,
    "Options": _options,
    "Naming": _naming,
    "Bundle": _bundle,
    "Body": _body,
    "operator": _operator,
    "symbol": _symbol,
    "expression": _expression,
    "error": _error,
}


# ---- values that are written where they stand ------------------------------------------------

_Read = Callable[[_Reader, list[Any], int], Any]


def _chosen(table: dict[str, Any], name: Any) -> Any:
    found = table.get(name) if type(name) is str else None
    if found is None:
        raise ArtifactError(f"{str(name)[:80]!r} is none of {', '.join(sorted(table))}.")
    return found


def _pairs(reader: _Reader, data: list[Any], depth: int = 0) -> dict[Any, Any]:
    flat = reader.values(data, depth)
    made = dict(zip(flat[::2], flat[1::2], strict=True))
    if len(made) * 2 != len(flat):
        raise ArtifactError("A mapping has a key twice.")
    return made


def _one_of(table: dict[str, Any]) -> _Read:
    def read(reader: _Reader, data: list[Any], depth: int) -> Any:
        _, name = data
        return _chosen(table, name)

    return read


def _text(make: Callable[[str], Any]) -> _Read:
    def read(reader: _Reader, data: list[Any], depth: int) -> Any:
        _, text = data
        if type(text) is not str:
            raise ArtifactError(f"{str(text)[:80]} is no text.")
        return make(text)

    return read


def _size(reader: _Reader, data: list[Any], depth: int) -> torch.Size:
    if not all(type(n) is int for n in data[1:]):
        raise ArtifactError("A size has numbers only.")
    return torch.Size(data[1:])


def _shape(reader: _Reader, data: list[Any], depth: int) -> Shape:
    made = Shape(reader.values(data[1:], depth))
    if not all(type(n) in (int, Number) for n in made):
        raise ArtifactError("A size has numbers only.")
    return made


def _frozenset(reader: _Reader, data: list[Any], depth: int) -> frozenset[Any]:
    return frozenset(reader.values(data[1:], depth))


def _slice(reader: _Reader, data: list[Any], depth: int) -> slice:
    _, start, stop, step = reader.values(data, depth)
    return slice(start, stop, step)


def _complex(reader: _Reader, data: list[Any], depth: int) -> complex:
    real, imaginary = reader.values(data[1:], depth)
    if type(real) is not float or type(imaginary) is not float:
        raise ArtifactError("A complex number has two parts.")
    return complex(real, imaginary)


def _tensor(reader: _Reader, data: list[Any], depth: int) -> Any:
    _, place = data
    if type(place) is not int or not 0 <= place < len(reader.tensors):
        raise ArtifactError(f"There is no tensor {str(place)[:80]} beside the data.")
    return reader.tensors[place]


def _class(reader: _Reader, data: list[Any], depth: int) -> Any:
    _, module, name = data
    try:
        return tensor_class(module, name)
    except NameError:
        raise ArtifactError(
            f"There is no class of tensors {str(name)[:80]} here: import {str(module)[:80]} before you load "
            "the file."
        ) from None


def _ellipsis(reader: _Reader, data: list[Any], depth: int) -> Any:
    return ...


_READ: dict[str, _Read] = {
    "tuple": lambda reader, data, depth: tuple(reader.values(data[1:], depth)),
    "list": lambda reader, data, depth: reader.values(data[1:], depth),
    "dict": lambda reader, data, depth: _pairs(reader, data[1:], depth),
    "frozenset": _frozenset,
    "size": _size,
    "shape": _shape,
    "slice": _slice,
    "complex": _complex,
    "bytes": _text(bytes.fromhex),
    "float": _one_of({"nan": math.nan, "inf": math.inf, "-inf": -math.inf}),
    "ellipsis": _ellipsis,
    "dtype": _one_of(DTYPES),
    "layout": _one_of(LAYOUTS),
    "memory_format": _one_of(MEMORY_FORMATS),
    "device": _text(torch.device),
    "creation": _one_of(CREATIONS),
    "type": _one_of(NUMBERS),
    "class": _class,
    "reshape": _one_of(RESHAPES),
    "tensor": _tensor,
}

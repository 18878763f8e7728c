"""Values that are written where they stand: numbers, containers, things of torch by name, references.

reader.value(["tuple", 1, [17]])      # (1, object 17)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from aheadgrad.codec.encoding import NUMBERS, Encoded
from aheadgrad.errors import ArtifactError
from aheadgrad.torchlayer.collection import no_collection
from aheadgrad.torchlayer.named import (
    CREATIONS,
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    RESHAPES,
    tensor_class,
)
from aheadgrad.torchlayer.symbols import Number, Shape

_DEEPEST = 32
_PLAIN = frozenset((str, int, bool, type(None)))


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


class Reader:
    """What was read so far: `objects`, and the names of all ops and values."""

    def __init__(self, encoded: Encoded, trust: Collection[str] | None) -> None:
        self.tensors = encoded.tensors
        self.trust = trust
        self.objects: list[Any] = []
        self.names: list[str] = []  # of all ops and values
        self.kind = ""

    def where(self) -> str:
        return f" (object {len(self.objects)}: {self.kind})" if self.kind else ""

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


_Read = Callable[[Reader, list[Any], int], Any]


def chosen(table: dict[str, Any], name: Any) -> Any:
    found = table.get(name) if type(name) is str else None
    if found is None:
        raise ArtifactError(f"{str(name)[:80]!r} is none of {', '.join(sorted(table))}.")
    return found


def pairs(reader: Reader, data: list[Any], depth: int = 0) -> dict[Any, Any]:
    flat = reader.values(data, depth)
    made = dict(zip(flat[::2], flat[1::2], strict=True))
    if len(made) * 2 != len(flat):
        raise ArtifactError("A mapping has a key twice.")
    return made


def _one_of(table: dict[str, Any]) -> _Read:
    def read(reader: Reader, data: list[Any], depth: int) -> Any:
        _, name = data
        return chosen(table, name)

    return read


def _text(make: Callable[[str], Any]) -> _Read:
    def read(reader: Reader, data: list[Any], depth: int) -> Any:
        _, text = data
        if type(text) is not str:
            raise ArtifactError(f"{str(text)[:80]} is no text.")
        return make(text)

    return read


def _size(reader: Reader, data: list[Any], depth: int) -> torch.Size:
    if not all(type(n) is int for n in data[1:]):
        raise ArtifactError("A size has numbers only.")
    return torch.Size(data[1:])


def _shape(reader: Reader, data: list[Any], depth: int) -> Shape:
    made = Shape(reader.values(data[1:], depth))
    if not all(type(n) in (int, Number) for n in made):
        raise ArtifactError("A size has numbers only.")
    return made


def _frozenset(reader: Reader, data: list[Any], depth: int) -> frozenset[Any]:
    return frozenset(reader.values(data[1:], depth))


def _slice(reader: Reader, data: list[Any], depth: int) -> slice:
    _, start, stop, step = reader.values(data, depth)
    return slice(start, stop, step)


def _complex(reader: Reader, data: list[Any], depth: int) -> complex:
    real, imaginary = reader.values(data[1:], depth)
    if type(real) is not float or type(imaginary) is not float:
        raise ArtifactError("A complex number has two parts.")
    return complex(real, imaginary)


def _tensor(reader: Reader, data: list[Any], depth: int) -> Any:
    _, place = data
    if type(place) is not int or not 0 <= place < len(reader.tensors):
        raise ArtifactError(f"There is no tensor {str(place)[:80]} beside the data.")
    return reader.tensors[place]


def _class(reader: Reader, data: list[Any], depth: int) -> Any:
    _, module, name = data
    try:
        return tensor_class(module, name)
    except NameError:
        raise ArtifactError(
            f"There is no class of tensors {str(name)[:80]} here: import {str(module)[:80]} before you load "
            "the file."
        ) from None


def _ellipsis(reader: Reader, data: list[Any], depth: int) -> Any:
    return ...


_READ: dict[str, _Read] = {
    "tuple": lambda reader, data, depth: tuple(reader.values(data[1:], depth)),
    "list": lambda reader, data, depth: reader.values(data[1:], depth),
    "dict": lambda reader, data, depth: pairs(reader, data[1:], depth),
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

"""Sizes that may be any: which dimensions of arguments are symbols, and what must hold of them.

dynamic_shapes={"x": {0: "batch"}, "mask": {0: "batch"}}      by path of an argument, and dimension
dynamic_shapes={"x": (0, 1)}                                  without names of one's own
dynamic_shapes=True                                           all sizes of all arguments
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from aheadgrad.errors import CaptureError, InvalidOption
from aheadgrad.export.signature import Place, Size
from aheadgrad.frontends.function import Flat
from aheadgrad.joint.level import Joint
from aheadgrad.program.values import Value
from aheadgrad.recording.recording import Recording
from aheadgrad.torchlayer.assumptions import conditions
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import new_mode, symbolic_like
from aheadgrad.torchlayer.symbols import Number


def symbols_for(flat: Flat, asked: Any) -> Symbols:
    """Symbols for the sizes that are asked for."""
    if asked is None:
        return Symbols()
    wanted = _wanted(flat, asked)
    mode = new_mode(dynamic=True)
    fakes: dict[int, Any] = {}
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        if isinstance(leaf, Tensor) and wanted.get(path):
            fake = symbolic_like(mode, leaf, f"L_{path}_", frozenset(wanted[path]), shared=False)
            fakes.setdefault(id(leaf), fake)
    return Symbols(mode, fakes)


def _wanted(flat: Flat, asked: Any) -> dict[str, dict[int, str]]:
    """By path: the dimensions that become symbols, with the names that the user has for them."""
    sizes = {
        path: tuple(leaf.shape)
        for leaf, path in zip(flat.leaves, flat.paths, strict=True)
        if isinstance(leaf, Tensor)
    }
    if asked is True:
        return {path: {d: "" for d, n in enumerate(size) if n > 1} for path, size in sizes.items()}
    if not isinstance(asked, Mapping):
        raise InvalidOption(f"dynamic_shapes={asked!r}: give {{path: dimensions}}, or True for all sizes.")
    found = {}
    for path, dims in asked.items():
        if path not in sizes:
            raise InvalidOption(f"dynamic_shapes: there is no tensor {path!r}; choose from {list(sizes)}.")
        if not isinstance(dims, Iterable):
            raise InvalidOption(f"dynamic_shapes[{path!r}]={dims!r}: give dimensions, as in {{0: 'batch'}}.")
        named = dims if isinstance(dims, Mapping) else dict.fromkeys(dims, True)
        chosen = [d for d, name in named.items() if name is not None]
        for d in chosen:
            if not isinstance(d, int) or not -len(sizes[path]) <= d < len(sizes[path]):
                raise InvalidOption(f"dynamic_shapes[{path!r}]: {path} has no dimension {d!r}.")
            if sizes[path][d] < 2:
                raise InvalidOption(
                    f"dynamic_shapes[{path!r}]: the example has size {sizes[path][d]} in dimension {d}; "
                    "sizes 0 and 1 are special to torch. Give an example of size 2 or more."
                )
        found[path] = {d % len(sizes[path]): _called(named[d]) for d in chosen}
    seen: dict[str, int] = {}
    for path, dims in found.items():
        for d, name in dims.items():
            if name and seen.setdefault(name, sizes[path][d]) != sizes[path][d]:
                raise InvalidOption(f"dynamic_shapes: {name!r} is {seen[name]} and {sizes[path][d]} at once.")
    return found


def _called(name: Any) -> str:
    """What a user calls a size: a text, or something with a name, as torch's `Dim` is."""
    return name if isinstance(name, str) else str(getattr(name, "__name__", ""))


def with_names(flat: Flat, asked: Any, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The sizes with the user's names; raises if one that was to be any has become a number."""
    if not isinstance(asked, Mapping):
        return sizes
    free = {(flat.paths[s.argument], s.dimension) for s in sizes}
    wanted = _wanted(flat, asked)
    for path, dims in wanted.items():
        for d in sorted(dims):
            if (path, d) not in free:
                leaf = flat.leaves[flat.paths.index(path)]
                raise CaptureError(
                    f"Dimension {d} of {path} was to be of any size, but the function works for size "
                    f"{leaf.shape[d]} only (it looks at the number, or combines it with one that is fixed)."
                )
    return tuple(replace(s, name=wanted[flat.paths[s.argument]].get(s.dimension, "")) for s in sizes)


def sizes_of(joint: Joint, inputs: tuple[Place, ...]) -> tuple[Size, ...]:
    """Where symbols are read off arguments."""
    found = []
    for place, e in zip(inputs, joint.entrances, strict=True):
        if place.kind == "argument" and type(e.value) is Value:
            for d, n in enumerate(e.value.type.size):
                if type(n) is Number:
                    found.append(Size(str(n.expr), place.of, d))
    return tuple(found)


def conditions_of(recording: Recording) -> tuple[Number, ...]:
    """What must hold of the symbols besides: relations that the function or its ops have asked about."""
    return tuple(Number(expr, bool) for expr in conditions(recording.session.mode))

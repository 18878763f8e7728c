"""The part of a check about arguments: their structure, the Python values among them, the same tensors.

Lists, tuples, dictionaries and named tuples are taken apart in place; structures that only pytree knows
are flattened by it. Plain values are compared by type and value, other objects by identity.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import Any

from torch import Tensor

from aheadgrad.frontends.function import Flat
from aheadgrad.frontends.plain import SIMPLE, Same, freeze, frozen
from aheadgrad.runtime.emit import Namespace, Script
from aheadgrad.torchlayer import trees as pytree

_OPENED = (tuple, list, dict, OrderedDict)


class ArgumentWriter:
    """Writes the conditions on one call's arguments; `ordered` if the function sees keywords' order."""

    def __init__(self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], *, ordered: bool) -> None:
        self.flat, self.args, self.kwargs, self.ordered = flat, args, kwargs, ordered
        self.tensors = {id(v): v for v in flat.leaves if isinstance(v, Tensor)}
        self.paths = {id(v): path for v, path in reversed(list(zip(flat.leaves, flat.paths, strict=True)))}
        self.where: dict[int, str] = {}

    def write(self, script: Script, misses: str) -> dict[int, str]:
        """By id of each tensor given: the name that it has in the check."""
        self.script, self.misses = script, misses
        self.names: Namespace = script.names
        if _is_open(self.args) and _is_open(self.kwargs):
            self._in_place()
            return self.where
        names = self.names
        flatten = names.name(pytree.flatten_shallow, "tree_flatten")
        script.line(f"leaves, spec = {flatten}((args, kwargs), {names.name(pytree.is_size, 'is_size')})")
        self.unless(f"spec == {names.name(self.flat.spec, 'expected_spec')}")
        keys = names.name(_keys(self.flat.spec), "expected_keys")
        self.unless(f"{names.name(_keys, 'keys')}(spec) == {keys}")
        for i, (value, path) in enumerate(zip(self.flat.leaves, self.flat.paths, strict=True)):
            self._value(f"leaves[{i}]", f"a{i}", value, path)
        return self.where

    def unless(self, test: str) -> None:
        with self.script.block(f"if not ({test}):"):
            self.script.line(f"return {self.misses}")

    def _in_place(self) -> None:
        count, keys = len(self.args), list(self.kwargs)
        self.unless(f"len(args) == {count}")
        if not keys:
            self.unless("not kwargs")
        elif self.ordered:
            self.unless(f"list(kwargs) == {keys!r}")
        else:
            self.unless(f"len(kwargs) == {len(keys)}")
        if self.args:
            self.script.line(f"{''.join(f'a{i}, ' for i in range(count))}= args")
        for i, value in enumerate(self.args):
            self._value(f"a{i}", f"a{i}", value, self.flat.top_paths[i])
        for i, (key, value) in enumerate(self.kwargs.items()):
            self.unless(f"{key!r} in kwargs")
            self._value(f"kwargs[{key!r}]", f"k{i}", value, key)

    def _value(self, source: str, name: str, value: Any, path: str) -> None:
        if source != name:
            self.script.line(f"{name} = {source}")
        if isinstance(value, Tensor):
            known = self.where.setdefault(id(value), name)
            if known != name:
                self.unless(f"{name} is {known}")
        elif not pytree.is_leaf(value) and (type(value) in _OPENED or is_named_tuple(value)):
            self._container(name, value, path)
        else:
            self.unless(self.same(name, value, path))

    def _container(self, name: str, value: Any, path: str) -> None:
        self.unless(f"type({name}) is {self.names.name(type(value), type(value).__name__)}")
        parts: list[tuple[str, Any]]
        if isinstance(value, dict):
            keys = list(value)
            if all(type(key) is str for key in keys):
                self.unless(f"list({name}) == {self.names.literal(keys)}")
            else:  # 1, True and 1.0 are equal, and so are others
                known = self.names.name(freeze(keys), "frozen")
                self.unless(f"{self.names.name(freeze, 'freeze')}(list({name})) == {known}")
            parts = [(f"{name}[{self.names.literal(key)}]", part) for key, part in value.items()]
        else:
            self.unless(f"len({name}) == {len(value)}")
            parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
        for i, (text, part) in enumerate(parts):
            self._value(text, f"{name}_{i}", part, f"{path}[{i}]")

    def same(self, text: str, value: Any, path: str) -> str:
        """The test that something is what it was."""
        return same_value(self.names, text, value, path)


def same_value(names: Namespace, text: str, value: Any, path: str) -> str:
    """The test that a value which is no tensor is the same as before."""
    if value is None or isinstance(value, bool):
        return f"{text} is {value}"
    if type(value) in SIMPLE and type(value) is not complex and not _is_odd(value):
        kind = names.name(type(value), type(value).__name__)
        return f"type({text}) is {kind} and {text} == {names.literal(value)}"
    known = frozen(value, path)
    if type(known) is Same:
        return f"{text} is {names.name(value, 'given')}"
    return f"{names.name(freeze, 'freeze')}({text}) == {names.name(known, 'frozen')}"


def is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields") and type(value) is not tuple


def _is_open(value: Any) -> bool:
    """Can this be taken apart without pytree?"""
    if type(value) in (tuple, list) or is_named_tuple(value):
        return all(map(_is_open, value))
    if type(value) in (dict, OrderedDict):
        return all(map(_is_open, value.values()))
    return isinstance(value, Tensor) or type(value) in SIMPLE or pytree.is_leaf(value)


def _is_odd(value: Any) -> bool:
    """A float that `==` does not tell from others: NaN, and zero with either sign."""
    return isinstance(value, float) and (math.isnan(value) or value == 0.0)


def _keys(spec: Any) -> Any:
    """The keys of the dictionaries in a structure; specs compare them by `==`, which 1 and True pass."""
    if spec is None:
        return None
    own = freeze(spec.context) if spec.type in (dict, OrderedDict, defaultdict) else None
    return own, tuple(map(_keys, pytree.children(spec)))

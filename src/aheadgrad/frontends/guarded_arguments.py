"""The part of a check about arguments: their structure, the Python values among them, the same tensors.

Lists, tuples, dictionaries and named tuples are taken apart in place; structures that only pytree knows
are flattened by it. Plain values are compared by type and value, other objects by identity.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aheadgrad.emit.script import Namespace
from aheadgrad.frontends.function import Flat
from aheadgrad.frontends.plain import SIMPLE, Same, freeze, frozen
from aheadgrad.torchlayer import trees as pytree

if TYPE_CHECKING:
    from aheadgrad.frontends.guards import GuardWriter

_OPENED = (tuple, list, dict, OrderedDict)


class ArgumentWriter:
    """Writes the conditions on one call's arguments; `ordered` if the function sees keywords' order."""

    def __init__(self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], *, ordered: bool) -> None:
        self.flat, self.args, self.kwargs, self.ordered = flat, args, kwargs, ordered
        self.tensors = {id(v): v for v in flat.leaves if isinstance(v, Tensor)}
        self.paths = {id(v): path for v, path in reversed(list(zip(flat.leaves, flat.paths, strict=True)))}
        self.where: dict[int, str] = {}
        self.symbolic: dict[int, Any] = {}  # by position among the leaves: symbols for Python numbers
        self.numbers: list[str] = []  # what those are called, in this order
        self._leaves = 0  # how many were looked at

    def write(self, writer: GuardWriter) -> dict[int, str]:
        """By id of each tensor given: the name that it has in the check."""
        self.script, self.names, self.unless = writer.script, writer.names, writer.unless
        script = self.script
        if _is_open(self.args) and _is_open(self.kwargs):
            self._in_place()
            return self.where
        names = self.names
        flatten = names.name(pytree.flatten_shallow, "tree_flatten")
        script.line(f"leaves, spec = {flatten}((args, kwargs), {names.name(pytree.is_size, 'is_size')})")
        what = "the structure of the arguments"
        self.unless(
            f"spec == {names.name(self.flat.spec, 'expected_spec')}", what, str(self.flat.spec), "str(spec)"
        )
        keys = names.name(_keys(self.flat.spec), "expected_keys")
        self.unless(
            f"{names.name(_keys, 'keys')}(spec) == {keys}", "keys of dictionaries", "as they were", "'others'"
        )
        for i, (value, path) in enumerate(zip(self.flat.leaves, self.flat.paths, strict=True)):
            self._value(f"leaves[{i}]", f"a{i}", value, path)
        return self.where

    def _in_place(self) -> None:
        count, keys = len(self.args), list(self.kwargs)
        self.unless(f"len(args) == {count}", "positional arguments", count, "len(args)")
        test = f"list(kwargs) == {keys!r}" if self.ordered and keys else f"len(kwargs) == {len(keys)}"
        self.unless(test if keys else "not kwargs", "keyword arguments", keys, "list(kwargs)")
        if self.args:
            self.script.line(f"{''.join(f'a{i}, ' for i in range(count))}= args")
        for i, value in enumerate(self.args):
            self._value(f"a{i}", f"a{i}", value, self.flat.top_paths[i])
        for i, (key, value) in enumerate(self.kwargs.items()):
            self.unless(f"{key!r} in kwargs", "keyword arguments", keys, "list(kwargs)")
            self._value(f"kwargs[{key!r}]", f"k{i}", value, key)

    def _value(self, source: str, name: str, value: Any, path: str) -> None:
        if source != name:
            self.script.line(f"{name} = {source}")
        if isinstance(value, Tensor):
            known = self.where.setdefault(id(value), name)
            if known != name:
                self.unless(
                    f"{name} is {known}", f"{path} and {self.paths[id(value)]}", "one tensor", "'two'"
                )
        elif not pytree.is_leaf(value) and (type(value) in _OPENED or is_named_tuple(value)):
            self._container(name, value, path)
            return
        elif self._leaves in self.symbolic:
            kind = type(value)
            self.unless(
                f"type({name}) is {self.names.name(kind, kind.__name__)}", path, kind, f"type({name})"
            )
            self.numbers.append(name)
        else:
            self.unless(same_value(self.names, name, value, path), path, value, name)
        self._leaves += 1

    def _container(self, name: str, value: Any, path: str) -> None:
        kind = type(value)
        self.unless(f"type({name}) is {self.names.name(kind, kind.__name__)}", path, kind, f"type({name})")
        parts: list[tuple[str, Any]]
        if isinstance(value, dict):
            keys = list(value)
            test = f"list({name}) == {self.names.literal(keys)}"
            if any(type(key) is not str for key in keys):  # 1, True and 1.0 are equal, and so are others
                known = self.names.name(freeze(keys), "frozen")
                test = f"{self.names.name(freeze, 'freeze')}(list({name})) == {known}"
            self.unless(test, f"the keys of {path}", keys, f"list({name})")
            parts = [(f"{name}[{self.names.literal(key)}]", part) for key, part in value.items()]
        else:
            self.unless(f"len({name}) == {len(value)}", f"the length of {path}", len(value), f"len({name})")
            parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
        for i, (text, part) in enumerate(parts):
            self._value(text, f"{name}_{i}", part, f"{path}[{i}]")


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

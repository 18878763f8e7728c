"""The part of a check about arguments: their structure, the Python values among them, the same tensors.

Lists, tuples, dictionaries and named tuples are taken apart in place; structures that only pytree knows
are flattened by it. Numbers, strings and other plain values are compared by type and value; other
objects by identity, and what the function reads off them is checked besides (`reach.py`).
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import Any

from torch import Tensor

from aheadgrad.frontends.checks import Checks
from aheadgrad.frontends.function import Flat
from aheadgrad.frontends.given import GivenWriter, is_named_tuple
from aheadgrad.frontends.plain import SIMPLE, describe, describe_all, freeze, frozen, is_compared
from aheadgrad.runtime.emit import Namespace
from aheadgrad.torchlayer import trees as pytree


class ValueWriter:
    """Writes the conditions on one call's arguments; `ordered` if the function sees keywords' order."""

    def __init__(self, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], *, ordered: bool) -> None:
        self.flat = flat
        self.args = args
        self.kwargs = kwargs
        self.ordered = ordered
        pairs = list(zip(flat.leaves, flat.paths, strict=True))
        self.paths = {id(v): path for v, path in reversed(pairs)}
        self.tensors = {id(v): v for v in flat.leaves if isinstance(v, Tensor)}
        self.taken_apart = self._is_open(self.args) and self._is_open(self.kwargs)
        self.later: list[tuple[str, Tensor, str]] = []
        self.where: dict[int, str] = {}

    def write(self, checks: Checks, names: Namespace) -> dict[int, str]:
        """By id of each tensor given: the name that it has in the check."""
        self.checks, self.names = checks, names
        self.given = GivenWriter(checks, names)
        if self.taken_apart:
            self._in_place()
        else:
            flatten = names.name(pytree.flatten_shallow, "tree_flatten")
            checks.line(f"leaves, spec = {flatten}((args, kwargs), {names.name(pytree.is_size, 'is_size')})")
            same = f"spec == {names.name(self.flat.spec, 'expected_spec')}"
            came = f"{names.name(_structure, 'structure')}(spec)"
            shown = _structure(self.flat.spec)
            checks.unless(same, "the structure of the arguments", shown, came, last=True)
            keys = (
                f"{names.name(_keys, 'keys')}(spec) == {names.name(_keys(self.flat.spec), 'expected_keys')}"
            )
            checks.unless(keys, "the keys of dictionaries", "as they were", "'of other types'", last=True)
            for i, (value, path) in enumerate(zip(self.flat.leaves, self.flat.paths, strict=True)):
                self._value(f"leaves[{i}]", f"a{i}", value, path)
        return self.where

    def write_containers(self, reached: list[Any]) -> None:
        """After `write`: each container is an object of its own, and none that the function reaches."""
        if self.taken_apart:
            self.given.write(reached)
        else:
            self.given.write_unopened(self.args, self.kwargs, reached)

    def _in_place(self) -> None:
        count, unless = len(self.args), self.checks.unless
        unless(f"len(args) == {count}", "positional arguments", str(count), "len(args)", last=True)
        keys, now = list(self.kwargs), "list(kwargs)"
        if not keys:
            unless("not kwargs", "keyword arguments", "none", now, last=True)
        elif self.ordered:
            unless(f"{now} == {keys!r}", "keyword arguments", str(keys), now, last=True)
        else:
            unless(f"len(kwargs) == {len(keys)}", "keyword arguments", str(keys), now, last=True)
        if self.args:
            self.checks.line(f"{''.join(f'a{i}, ' for i in range(count))}= args")
        paths = self.flat.top_paths
        for i, value in enumerate(self.args):
            self._value(f"a{i}", f"a{i}", value, paths[i])
        for i, (key, value) in enumerate(self.kwargs.items()):
            unless(f"{key!r} in kwargs", "keyword arguments", key, now, last=True)
            self._value(f"kwargs[{key!r}]", f"k{i}", value, key)

    def _is_open(self, value: Any) -> bool:
        """Can this be taken apart without pytree?"""
        if type(value) in (tuple, list) or is_named_tuple(value):
            return all(self._is_open(v) for v in value)
        if type(value) in (dict, OrderedDict):
            return all(self._is_open(v) for v in value.values())
        return isinstance(value, Tensor) or type(value) in SIMPLE or pytree.is_leaf(value)

    def _value(self, source: str, name: str, value: Any, path: str) -> None:
        if source != name:
            self.checks.line(f"{name} = {source}")
        self.given.note(name, value)
        if isinstance(value, Tensor):
            self._tensor(name, value, path)
        elif self._takes_apart(value):
            self._container(name, value, path)
        else:
            self.constant(self.checks, self.names, name, value, path)

    def _takes_apart(self, value: Any) -> bool:
        kinds = (tuple, list, dict, OrderedDict)
        return not pytree.is_leaf(value) and (type(value) in kinds or is_named_tuple(value))

    def _tensor(self, name: str, value: Tensor, path: str) -> None:
        known = self.where.get(id(value))
        if known is None:
            self.where[id(value)] = name
        else:
            other = self.paths[id(value)]
            self.checks.unless(f"{name} is {known}", f"{path} and {other}", "the same tensor", "'two'")

    def _container(self, name: str, value: Any, path: str) -> None:
        kind = self.names.name(type(value), type(value).__name__)
        now = f"type({name}).__name__"
        same = f"type({name}) is {kind}"
        self.checks.unless(same, path, f"a {type(value).__name__}", now, last=True)
        if isinstance(value, dict):
            self._key_test(name, list(value), path)
            literal, items = self.names.literal, value.items()
            parts = [(f"{name}[{literal(key)}]", part, f"{path}[{describe(key)}]") for key, part in items]
        else:
            if hasattr(value, "__dict__"):
                self.checks.unless(f"not {name}.__dict__", path, "no attributes besides fields", "'some'")
            size = f"len({name})"
            test = f"{size} == {len(value)}"
            self.checks.unless(test, path, f"{len(value)} elements", size, last=True)
            parts = [(f"{name}[{i}]", part, f"{path}[{i}]") for i, part in enumerate(value)]
        for i, (text, part, where) in enumerate(parts):
            self._value(text, f"{name}_{i}", part, where)

    def _key_test(self, name: str, keys: list[Any], path: str) -> None:
        now = f"list({name})"
        test = f"{now} == {self.names.literal(keys)}"
        if any(type(key) is not str for key in keys):  # 1, True and 1.0 are equal, and so are others
            test = f"{self.names.name(freeze, 'freeze')}({now}) == {self.names.name(freeze(keys), 'frozen')}"
        came = f"{self.names.name(describe_all, 'describe_all')}({name})"
        self.checks.unless(test, f"the keys of {path}", describe_all(keys), came, last=True)

    @staticmethod
    def constant(checks: Checks, names: Namespace, name: str, value: Any, path: str) -> None:
        """A value that is no tensor is the same as before."""
        assumed, came = describe(value), f"{names.name(describe, 'describe')}({name})"
        if value is None or isinstance(value, bool):
            test = f"{name} is {value}"
        elif type(value) in SIMPLE and type(value) is not complex and not _is_odd(value):
            kind = names.name(type(value), type(value).__name__)
            test = f"type({name}) is {kind} and {name} == {names.literal(value)}"
        elif is_compared(value):
            known = names.name(frozen(value, path), "frozen")
            test = f"{names.name(freeze, 'freeze')}({name}) == {known}"
        else:
            test = f"{name} is {names.name(value, 'given')}"
            assumed += " (compared by identity)"
        checks.unless(test, path, assumed, came)


def _is_odd(value: Any) -> bool:
    """A float that `==` does not tell from others: NaN, and zero with either sign."""
    return isinstance(value, float) and (math.isnan(value) or value == 0.0)


def _structure(spec: Any) -> str:
    """`tuple(*, dict(['a'], *))`: a structure in words, without asking the user's objects for theirs."""
    if spec is None:
        return "something nested too deeply"
    if spec.is_leaf():
        return "*"
    keys = [describe_all(spec.context)] if spec.type in (dict, OrderedDict) else []
    return f"{spec.type.__name__}({', '.join([*keys, *map(_structure, pytree.children(spec))])})"


def _keys(spec: Any) -> Any:
    """The keys of the dictionaries in a structure; specs compare them by `==`, which 1 and True pass."""
    own = freeze(spec.context) if spec.type in (dict, OrderedDict, defaultdict) else None
    return own, tuple(map(_keys, pytree.children(spec)))

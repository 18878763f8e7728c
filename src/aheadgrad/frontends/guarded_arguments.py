"""The part of a check about arguments: their structure, the Python values among them, the same tensors.

Structures are taken apart by what pytree knows of them. Plain values are compared by type and value, other
objects by identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from aheadgrad.frontends.function import Flat
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.subclasses import same_meta

if TYPE_CHECKING:
    from aheadgrad.frontends.checks import Check


class ArgumentWriter:
    """Writes the conditions on one call's arguments.

    `symbolic` has the symbols for Python numbers, by position among the leaves; `numbers` tells what those
    are called in the check, in this order.
    """

    def __init__(self, flat: Flat, symbolic: dict[int, Any]) -> None:
        self.flat, self.symbolic = flat, symbolic
        self.tensors = {id(v): v for v in flat.leaves if isinstance(v, Tensor)}
        self.paths = {id(v): path for v, path in reversed(list(zip(flat.leaves, flat.paths, strict=True)))}
        self.numbers: list[str] = []
        self._leaves = 0  # how many were looked at

    def write(self, check: Check, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.check, self.script = check, check.script
        count, keys = len(args), list(kwargs)
        check.equal("positional arguments", "len(args)", count)
        test = f"list(kwargs) == {keys!r}" if keys else "not kwargs"
        check.unless(test, "keyword arguments", keys, "list(kwargs)")
        if args:
            self.script.line(f"{''.join(f'a{i}, ' for i in range(count))}= args")
        for i, value in enumerate(args):
            self._value(f"a{i}", value, self.flat.top_paths[i])
        for i, (key, value) in enumerate(kwargs.items()):
            self.script.line(f"k{i} = kwargs[{key!r}]")
            self._value(f"k{i}", value, key)

    def _value(self, name: str, value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            known = self.check.where.setdefault(id(value), name)
            if known != name:
                both = f"{path} and {self.paths[id(value)]}"
                self.check.unless(f"{name} is {known}", both, "one tensor", "'two'")
        elif not pytree.is_leaf(value) and not pytree.is_size(value):
            self._container(name, value, path)
            return
        elif self._leaves in self.symbolic:
            self._kind(name, value, path)
            self.numbers.append(name)
        else:
            self.check.same(path, name, value)
        self._leaves += 1

    def _kind(self, name: str, value: Any, path: str) -> None:
        self.check.equal(path, f"type({name})", type(value))

    def _container(self, name: str, value: Any, path: str) -> None:
        """Taken apart as pytree does it, part by part."""
        self._kind(name, value, path)
        check, names = self.check, self.check.names
        opened = pytree.opener(value)
        parts, context = opened(value)
        self.script.line(f"{name}_, context = {names.name(opened, 'opened')}({name})")
        check.equal(f"the length of {path}", f"len({name}_)", len(parts))
        if isinstance(value, dict):  # keys, of which 1 and True are equal but not the same
            check.same(f"the keys of {path}", "context", context)
        elif context is not None:
            same = f"{names.name(same_meta, 'same_meta')}(context, {names.name(context, 'context')})"
            check.unless(same, path, "the same structure", "'another'")
        for i, part in enumerate(parts):
            self.script.line(f"{name}_{i} = {name}_[{i}]")
            self._value(f"{name}_{i}", part, f"{path}[{i}]")

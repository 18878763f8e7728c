"""Structures of arguments and results as plain values: what holds what, by names.

Containers of Python (list, tuple, dict, OrderedDict, defaultdict, deque) are rebuilt as they are. Others
(named tuples, dataclasses, the outputs of Hugging Face models) are known by module and name: where that
module is imported already they are made again, elsewhere they become dictionaries.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from aheadgrad.errors import UnsupportedInput
from aheadgrad.torchlayer import trees as pytree

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}
_TABLES: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}
_KEYS = (str, int, bool, float, type(None))


@dataclass(frozen=True)
class Tree:
    """A leaf (`kind` is "leaf"), or a container: `keys` are those of a dictionary, or names of fields;
    `where` is `(module, name)` of a class that is not Python's own."""

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    where: tuple[str, str] | None = None

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(c.leaves for c in self.children)


LEAF = Tree("leaf")


def tree_of(value: Any, what: str) -> tuple[list[Any], Tree]:
    """The leaves of a value in the order of torch's pytree, and its structure; `what` is for errors."""
    if pytree.is_size(value) or pytree.is_leaf(value):
        return [value], LEAF
    parts, _ = pytree.opener(value)(value)
    opened = [tree_of(part, what) for part in parts]
    leaves = [leaf for found, _ in opened for leaf in found]
    return leaves, _container(value, tuple(tree for _, tree in opened), what)


def _container(value: Any, children: tuple[Tree, ...], what: str) -> Tree:
    kind = type(value)
    if kind in (list, tuple, deque):
        return Tree(kind.__name__, children)
    if isinstance(value, dict):
        keys = tuple(pytree.opener(value)(value)[1] if kind is dict else value)
        if not all(type(k) in _KEYS for k in keys):
            raise UnsupportedInput(f"{what} has a dictionary with keys other than strings and numbers.")
        if kind in (dict, OrderedDict):
            return Tree(kind.__name__, children, keys)
        return Tree("table", children, keys, _named(kind))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Tree("fields", children, tuple(value._fields), _named(kind))
    if is_dataclass(value):
        names = tuple(f.name for f in fields(value))
        if len(names) == len(children):
            return Tree("fields", children, names, _named(kind))
    if isinstance(value, tuple):
        return Tree("sequence", children, (), _named(kind))
    raise UnsupportedInput(f"{what} has a {kind.__qualname__}, a structure that an export cannot describe.")


def _named(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def paths(tree: Tree, path: str = "") -> Iterator[str]:
    """How each leaf is written: `['loss']`, `[0]`, `.hidden`; nothing for a leaf that is all there is."""
    if tree.kind == "leaf":
        yield path
    for k, child in enumerate(tree.children):
        key = tree.keys[k] if tree.keys else k
        yield from paths(child, f"{path}.{key}" if tree.kind == "fields" else f"{path}[{key!r}]")


def build(tree: Tree, leaves: Iterator[Any]) -> Any:
    """The structure around these leaves."""
    if tree.kind == "leaf":
        return next(leaves)
    parts = [build(child, leaves) for child in tree.children]
    if tree.kind in _SEQUENCES:
        return _SEQUENCES[tree.kind](parts)
    if tree.kind in _TABLES:
        return _TABLES[tree.kind](zip(tree.keys, parts, strict=True))
    kind = _known(tree.where)
    if tree.kind == "sequence":
        return tuple(parts) if kind is None else kind(parts)
    named = dict(zip(tree.keys, parts, strict=True))
    if kind is None or kind is defaultdict:
        return named
    try:
        return kind(**named) if all(isinstance(k, str) for k in named) else kind(named)
    except TypeError:
        return named


def _known(where: tuple[str, str] | None) -> Any:
    """A class, if its module is imported by now: a file must not decide what is imported."""
    if where is None:
        return None
    found: Any = sys.modules.get(where[0])
    for name in where[1].split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) and pytree.is_container(found) else None

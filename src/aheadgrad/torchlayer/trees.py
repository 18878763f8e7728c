"""Nested structures (torch's pytree): flattening, rebuilding, and specs across torch releases."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    _get_node_type,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "children",
    "is_container",
    "is_leaf",
    "is_size",
    "opener",
    "parts",
    "spec_from",
    "spec_text",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
]


def is_size(value: Any) -> bool:
    """A `torch.Size` is one value, although pytree would open it."""
    return isinstance(value, torch.Size)


def opener(value: Any) -> Any:
    """The function that opens values of this kind: their parts, and what else there is to know of them."""
    return SUPPORTED_NODES[_get_node_type(value)].flatten_fn


def is_container(kind: type) -> bool:
    """Does flattening open values of this kind?"""
    return kind in SUPPORTED_NODES or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def parts(value: Any) -> list[Any]:
    """What a container holds, one level down."""
    return tree_leaves(value, is_leaf=lambda v: v is not value)


def is_leaf(value: Any) -> bool:
    """Is this something that flattening does not open?"""
    return bool(tree_is_leaf(value))


def children(spec: Any) -> list[Any]:
    """The specs of a node's children."""
    if hasattr(type(spec), "children"):
        return list(spec.children())
    return list(spec.children_specs)


def spec_text(spec: Any) -> str:
    """A spec as text that another process can read; raises for classes that nobody gave a name to."""
    return treespec_dumps(spec)


def spec_from(text: str) -> Any:
    return treespec_loads(text)

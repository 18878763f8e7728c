"""Tree specs of pytree, across torch releases."""

from __future__ import annotations

from typing import Any


def children(spec: Any) -> list[Any]:
    if hasattr(type(spec), "children"):
        return list(spec.children())
    return list(spec.children_specs)

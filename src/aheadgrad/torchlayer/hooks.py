"""What torch.nn keeps for all modules at once: global hooks."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as _module

_NAMES = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def global_hooks() -> dict[str, dict[Any, Any]]:
    """The tables of hooks for all modules, by name."""
    found = {name: vars(_module).get(name) for name in (f"_global_{name}" for name in _NAMES)}
    return {name: table for name, table in found.items() if isinstance(table, dict)}

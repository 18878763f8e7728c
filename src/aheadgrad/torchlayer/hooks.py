"""What torch.nn keeps for all modules at once: global hooks."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as _module

GLOBAL_HOOKS = tuple(
    name
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    if isinstance(getattr(_module, name, None), dict)
)


def global_hooks() -> dict[str, Any]:
    """The dictionary that holds the tables called `GLOBAL_HOOKS`."""
    return vars(_module)

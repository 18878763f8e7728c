"""What torch's modules do around `forward`."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _torch

_OWN = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_is_forward(module: nn.Module) -> bool:
    """Does calling a module do what its `forward` does: no hooks, no `__call__` of the user's?"""
    if type(module).__call__ is not nn.Module.__call__:
        return False
    return not (_torch._has_any_global_hook() or any(getattr(module, table) for table in _OWN))

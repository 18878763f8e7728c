"""Hooks that torch keeps: of torch.nn for all modules at once, and of single tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.nn.modules import module as _module

from aheadgrad.torchlayer.dispatch import active_function_modes, no_function_modes

_NAMES = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def global_hooks() -> dict[str, dict[Any, Any]]:
    """The tables of hooks for all modules, by name."""
    found = {name: vars(_module).get(name) for name in (f"_global_{name}" for name in _NAMES)}
    return {name: table for name, table in found.items() if isinstance(table, dict)}


def hooks_on(t: Tensor) -> list[Any]:
    """The hooks that a tensor has: on its gradient, and after that was added to `.grad`."""
    return [hook for table in _tables(t) for hook in table.values()]


def has_hooks_after_grad(t: Tensor) -> bool:
    return bool(_tables(t)[1])


def _tables(t: Tensor) -> tuple[dict[Any, Any], dict[Any, Any]]:
    held: Any = t
    with no_function_modes():  # of this tensor, not of one that stands for it in a trace
        return held._backward_hooks or {}, held._post_accumulate_grad_hooks or {}


def share_hooks(t: Tensor, other: Tensor) -> None:
    """Another leaf gets the hooks of this one, which see what is seen here: torch runs them outside of the
    mode that `backward()` was called in."""
    modes = active_function_modes()
    of_gradient, after = _tables(t)
    for hook in of_gradient.values():
        other.register_hook(_inside(hook, modes))
    for hook in after.values():
        other.register_post_accumulate_grad_hook(_inside(hook, modes))


def _inside(hook: Callable[..., Any], modes: list[Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with ExitStack() as stack:
            on = active_function_modes()
            for mode in (m for m in modes if not any(m is one for one in on)):
                stack.enter_context(mode)
            return hook(*args)

    return run

"""Hooks that torch keeps: of torch.nn for all modules at once, and of single tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as _module

from aheadgrad.torchlayer.autograd import at_end_of_backward
from aheadgrad.torchlayer.dispatch import active_function_modes, no_function_modes
from aheadgrad.torchlayer.wanted import LEAF

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


def quiet_hooks(places: frozenset[int]) -> Callable[[Any, Tensor], None]:
    """For nodes of ours: how they take the hooks of their outputs. Those of `places` are not called without a
    gradient: in eager such an output has a node of its own, which a backward of the others does not visit."""

    def register(node: Any, output: Any) -> None:
        hooks = output._backward_hooks
        if output.output_nr in places:
            output._backward_hooks = {0: _with_gradients(hooks)}
        BackwardCFunction._register_hook_dict(node, output)
        if output.output_nr in places:
            output._backward_hooks = hooks

    return register


def quiet_leaves(node: Any) -> None:
    """For the rest of this backward, hooks of a node's leaves are not called without a gradient: in eager it
    does not get to leaves that only other outputs lead to."""
    tables = [_tables(e.variable)[0] for e, _ in node.next_functions if e.__class__ is LEAF]
    quiet = [(table, key, hook) for table in tables for key, hook in table.items()]
    if quiet:
        for table, key, hook in quiet:
            table[key] = _with_gradients({0: hook})
        at_end_of_backward(partial(_put_back, quiet))


def _put_back(hooks: list[tuple[dict[Any, Any], Any, Any]]) -> None:
    for table, key, hook in reversed(hooks):
        if key in table:
            table[key] = hook


def _with_gradients(hooks: dict[Any, Callable[[Tensor], Any]]) -> Callable[[Any], Any]:
    def run(grad: Tensor | None) -> Tensor | None:
        if grad is not None:
            for hook in list(hooks.values()):
                new = hook(grad)
                grad = grad if new is None else new
        return grad

    return run


def _inside(hook: Callable[..., Any], modes: list[Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with ExitStack() as stack:
            on = active_function_modes()
            for mode in (m for m in modes if not any(m is one for one in on)):
                stack.enter_context(mode)
            return hook(*args)

    return run

"""The transforms of `torch.func` that are active around a call, innermost first, and their wrapped tensors.

Each `grad`, `vmap` or `jvp` is a level. A tensor that takes part in it is wrapped at that level; what is
inside the wrapper belongs to the levels below. Whoever takes a call apart unwraps its tensors, goes down a
level, and wraps the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch.autograd.function import _SingleLevelFunction

_functorch: Any = torch._C._functorch
_KINDS = {
    _functorch.TransformType.Grad: "grad",
    _functorch.TransformType.Jvp: "jvp",
    _functorch.TransformType.Vmap: "vmap",
}
set_aside = temporarily_clear_interpreter_stack
"""As if there were no transforms; gives them, for `back_in`."""

back_in = temporarily_restore_interpreter_stack


def without_dead_levels(t: Any) -> Any:
    """A tensor as ops see it: wrappers of levels that are left already do not count."""
    while isinstance(t, Tensor) and _functorch.is_dead_tensor_wrapper(t):
        t = _functorch.unwrap_if_dead(t)
    return t


def depth() -> int:
    return int(_functorch.get_dynamic_layer_stack_depth())


def kinds() -> list[str]:
    """The kinds of the active levels; other transforms than these are called by no name."""
    return [_KINDS.get(level.key(), "") for level in _functorch.get_interpreter_stack() or ()]


def is_batched_here(t: Tensor) -> bool:
    """Is this tensor one of the innermost transform's?"""
    return bool(_functorch.maybe_get_level(t) == _functorch.maybe_current_level())


def takes_part(t: Tensor) -> Iterator[int]:
    """The levels that a tensor is wrapped at."""
    while _functorch.is_functorch_wrapped_tensor(t):
        yield _functorch.maybe_get_level(t)
        t = _functorch.get_unwrapped(t)


class Level:
    """The innermost level."""

    def __init__(self) -> None:
        self._interpreter: Any = retrieve_current_functorch_interpreter()
        self.number: int = self._interpreter.level()
        self.kind = _KINDS.get(self._interpreter.key(), "")

    @contextmanager
    def below(self, *, from_node: bool = False) -> Iterator[None]:
        """In the levels below. A node switches grad mode off, but that concerns its own level alone."""
        if not from_node:
            with self._interpreter.lower():
                yield
            return
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), self._interpreter.lower():
            yield

    def lift(self, t: Tensor) -> Tensor:
        """A tensor as one of this level; what it requires of the levels below is hidden."""
        lifted: Tensor = self._interpreter._cptr.lift(t)
        return lifted

    def unwrap(self, t: Tensor) -> Tensor:
        return _functorch._unwrap_for_grad(t, self.number)

    def wrap(self, t: Tensor) -> Tensor:
        return _functorch._wrap_for_grad(t, self.number)

    # batched tensors

    @property
    def randomness(self) -> str:
        return str(self._interpreter.randomness())

    def unbatch(self, t: Tensor) -> tuple[Tensor, int | None]:
        inner, dim = _functorch._unwrap_batched(t, self.number)
        return inner, dim

    def batch(self, t: Tensor) -> Tensor:
        return _functorch._add_batch_dim(t, 0, self.number)


# a node of one level: its inputs and outputs are wrapped tensors of it, whatever there is below
SingleLevelFunction = _SingleLevelFunction


def apply_at_level(node: type, *args: Any) -> Any:
    before = _functorch.get_single_level_autograd_function_allowed()
    _functorch.set_single_level_autograd_function_allowed(True)
    try:
        return node.apply(*args)  # type: ignore[attr-defined]
    finally:
        _functorch.set_single_level_autograd_function_allowed(before)


# duals


def taken_apart(operands: Sequence[Any]) -> tuple[list[Any], dict[int, Tensor]]:
    """What is left without tangents of the current dual level, and these."""
    rest, tangents = list(operands), {}
    for k, t in enumerate(operands):
        if isinstance(t, Tensor):
            rest[k], tangent = forward_ad.unpack_dual(t, level=int(forward_ad._current_level))
            if tangent is not None:
                tangents[k] = tangent
    return rest, tangents


def made_dual(t: Tensor, tangent: Tensor) -> Tensor:
    made: Tensor = forward_ad.make_dual(t, tangent, level=int(forward_ad._current_level))
    return made

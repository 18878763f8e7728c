"""Function transforms of `torch.func`, as far as compiling has to know them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CODE = torch.func.functionalize(lambda: None).__code__


def without_functionalize(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside `torch.func.functionalize(fn)`: a capture functionalizes anyway."""
    while getattr(fn, "__code__", None) is _CODE:
        fn = fn.__wrapped__  # type: ignore[attr-defined]
    return fn


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside transforms: as if there were none, for a tensor from outside of all of them."""
    if torch._C._functorch.maybe_current_level() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Is this one of the tensors that `autograd.grad(..., is_grads_batched=True)` passes to backwards?"""


def batch_level() -> int:
    """The level of the batched tensors that are passed about now."""
    above = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return int(above) - 1


def unbatched(t: Tensor, level: int) -> Tensor:
    """What a batched tensor stands for: its first dimension is the batch."""
    return torch._remove_batch_dim(t, level, 1, 0)


def batched(t: Tensor, level: int) -> Tensor:
    return torch._add_batch_dim(t, 0, level)

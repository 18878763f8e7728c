"""`torch.utils.checkpoint` inside a function that is recorded: which ops belong to a region, and which of
them its policy saves.

A region is known by the saved-tensor hooks that it sets; older torch marks the nodes of Dynamo's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint as checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from aheadgrad.torchlayer.autograd import saved_tensor_hooks
from aheadgrad.torchlayer.lock import here, must_be_held

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)


class Regions:
    """The regions of one recording, numbered. `outer` are the hooks that were set before it began."""

    def __init__(self) -> None:
        self.outer: Any = None
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by hooks, which hold tensors
        self._count = 0

    def now(self, meta: dict[str, Any] | None) -> tuple[int, bool] | None:
        """The number of the region that runs now, and whether results are saved; None outside of any."""
        hooks = saved_tensor_hooks()
        if hooks is not None and (self.outer is None or hooks[0] is not self.outer[0]) and _is_region(hooks):
            if hooks[0] not in self._numbers:
                self._count += 1
                self._numbers[hooks[0]] = self._count
            return self._numbers[hooks[0]], False
        if meta and "recompute" in meta:
            return -1 - (meta.get("ac_graph_id") or 0), meta["recompute"] in _SAVES
        return None


def _is_region(hooks: Any) -> bool:
    return getattr(hooks[0], "__module__", "") == checkpoint.__name__


class _NotReentrant:
    """Stands for the autograd function that runs a region again by a backward inside a backward: recorded
    gradients are asked for by name, which it refuses."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        with torch.no_grad():
            return function(*args)


@contextmanager
def watching_regions(recorded: Callable[[], int], saved: Callable[[int], None]) -> Iterator[None]:
    """`saved(n)` is called where a policy saves the results of the ops that were recorded from the nth on."""
    must_be_held()
    is_here = here()
    mode: Any = checkpoint._CachingTorchDispatchMode
    original = mode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_here():
            return original(self, func, types, args, kwargs)
        start, policy = recorded(), self.policy_fn
        verdicts: list[Any] = []

        def asked(*args: Any, **kwargs: Any) -> Any:
            verdicts.append(policy(*args, **kwargs))
            return verdicts[-1]

        self.policy_fn = asked
        try:
            return original(self, func, types, args, kwargs)
        finally:
            self.policy_fn = policy
            if verdicts and verdicts[-1] in _SAVES:
                saved(start)

    reentrant: Any = checkpoint.CheckpointFunction

    class Function(reentrant):
        @staticmethod
        def apply(*args: Any) -> Any:
            return (_NotReentrant if is_here() else reentrant).apply(*args)

    mode.__torch_dispatch__ = dispatch
    module: Any = checkpoint
    module.CheckpointFunction = Function
    try:
        yield
    finally:
        module.CheckpointFunction = reentrant
        mode.__torch_dispatch__ = original

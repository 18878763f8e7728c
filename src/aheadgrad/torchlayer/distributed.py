"""Several processes: collectives, results that are still on their way, wrappers that talk around a call.

All by names and by what is loaded already: torch may have been built without `torch.distributed`, and
most programs never import it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aheadgrad.torchlayer.dispatch import OpOverload, schema_of

_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_PENDING = "torch.distributed._functional_collectives"

# How each wrapper is called, and where it begins a call: before it touches anything of its own.
_BEGINNINGS = (
    ("DistributedDataParallel", "torch.nn.parallel.distributed", "DistributedDataParallel._pre_forward"),
    ("replicate", "torch.distributed._composable.replicate", "_ReplicateState.lazy_init"),
    ("fully_shard", "torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._root_pre_forward"),
    (
        "FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel.forward",
    ),
)


@functools.cache
def is_collective(op: Any) -> bool:
    """A collective that returns its result. The other processes wait for it, used or not."""
    return isinstance(op, OpOverload) and op.namespace in _FUNCTIONAL


@functools.cache
def is_hidden_collective(op: Any) -> bool:
    """A collective that writes to its arguments without saying so, and returns a handle to wait for."""
    return isinstance(op, OpOverload) and op.namespace == "c10d"


@functools.cache
def waiting_for(op: Any) -> Any:
    """The op that waits for a result, in place of one that wraps it in a tensor that waits when used."""
    if isinstance(op, OpOverload) and schema_of(op).name == "_c10d_functional::_wrap_tensor_autograd":
        return torch.ops._c10d_functional.wait_tensor.default
    return op


def is_pending(kind: type) -> bool:
    """The kind of tensor whose value may still be on its way (`trigger_wait()` waits for it)."""
    loaded = sys.modules.get(_PENDING)
    return loaded is not None and issubclass(kind, loaded.AsyncCollectiveTensor)


@contextmanager
def noticing_wrappers(tell: Callable[[str], None]) -> Iterator[None]:
    """`tell(name)` is called before a wrapper that talks to other processes begins a call in this thread."""
    changed = []
    for name, module, path in _BEGINNINGS:
        kind, method = path.split(".")
        owner = getattr(sys.modules.get(module), kind, None)
        if owner is not None:
            original = vars(owner)[method]
            changed.append((owner, method, original))
            setattr(owner, method, _noticed(original, functools.partial(tell, name)))
    try:
        yield
    finally:
        for owner, method, original in changed:
            setattr(owner, method, original)


def _noticed(original: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def begin(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            tell()
        return original(*args, **kwargs)

    return begin

"""Several processes: collectives, and wrappers of modules that talk around each call.

All by names and by what is loaded already: torch may have been built without `torch.distributed`, and
most programs never import it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from aheadgrad.torchlayer.dispatch import OpOverload, schema_of

_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")

# How each wrapper is called, and where it begins a call: before it does anything that cannot be undone.
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


class _Recordings:
    """How many recordings there are now, in all threads, and what they have replaced."""

    lock = threading.Lock()
    count = 0
    originals: ClassVar[dict[tuple[type, str], Callable[..., Any]]] = {}


_here = threading.local()  # `tell`: whom this thread tells


@contextmanager
def noticing_wrappers(tell: Callable[[str], None]) -> Iterator[None]:
    """`tell(name)` is called before a wrapper that talks to other processes begins a call in this thread."""
    before, _here.tell = getattr(_here, "tell", None), tell
    with _Recordings.lock:
        _Recordings.count += 1
        for name, module, path in _BEGINNINGS:
            kind, method = path.split(".")
            owner = getattr(sys.modules.get(module), kind, None)
            if owner is not None and (owner, method) not in _Recordings.originals:
                _Recordings.originals[owner, method] = vars(owner)[method]
                setattr(owner, method, _noticed(vars(owner)[method], name))
    try:
        yield
    finally:
        _here.tell = before
        with _Recordings.lock:
            _Recordings.count -= 1
            while not _Recordings.count and _Recordings.originals:
                (owner, method), original = _Recordings.originals.popitem()
                setattr(owner, method, original)


def _noticed(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def begin(*args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "tell", None) is not None:
            _forget_beginning(args[0])
            _here.tell(name)
        return original(*args, **kwargs)

    return begin


def _forget_beginning(wrapper: Any) -> None:
    """`fully_shard` has noted by then that a forward has begun, and would not begin the next one."""
    state = getattr(wrapper, "_training_state", None)
    if state is not None:
        wrapper._training_state = type(state).IDLE

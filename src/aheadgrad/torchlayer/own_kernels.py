"""Ops that keep their kernels while symbolic sizes are recorded.

With symbolic sizes torch takes composite ops apart in Python. It does so for a few ops that have a kernel,
too (upsampling, `softshrink`, ...); their Python versions round otherwise, and lay out dimensions of one
element otherwise. The kernel's op is recorded instead, as it is with plain sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from aheadgrad.torchlayer.dispatch import OpOverload, OpOverloadPacket
from aheadgrad.torchlayer.lock import must_be_held

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_users = 0
_taken: list[tuple[Any, Any, Any]] = []


@functools.cache
def _ops() -> list[OpOverload]:
    """The ops with a kernel for which there is a Python version that comes before it."""
    import torch._decomp.decompositions  # where such versions are registered

    packets = [p for p in vars(torch.ops.aten).values() if isinstance(p, OpOverloadPacket)]
    loaded = [op for packet in packets for op in vars(packet).values() if isinstance(op, OpOverload)]
    return [op for op in loaded if _comes_second(op)]


def _comes_second(op: OpOverload) -> bool:
    return any(key in op.py_kernels for key in _KEYS) and _has_kernel(op)


def _has_kernel(op: OpOverload) -> bool:
    """Has the op, or another overload of it (`upsample_nearest2d.default` for `.vec`), a kernel?"""
    packet = op.overloadpacket
    ops = [getattr(packet, overload) for overload in packet.overloads() if overload != "out"]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not all(has(o.name(), "CompositeImplicitAutograd") for o in ops)


def _by_kernel(kernel: OpOverload) -> Callable[..., Any]:
    """Upsampling to a size or by factors (`vec`): a formula gives the size, the kernel does the rest."""

    def upsample(t: Tensor, output_size: Any, *rest: Any) -> Any:
        from torch._decomp.decompositions import get_scale_value, upsample_compute_output_size

        *options, factors = rest
        size = upsample_compute_output_size(t.size(), output_size, factors)
        return kernel(t, size, *options, *(get_scale_value(factors, i) for i in range(len(size))))

    return upsample


@contextmanager
def own_kernels() -> Iterator[None]:
    """Inside, ops that have a kernel are not taken apart."""
    global _users
    must_be_held()
    if not _users:
        for op in _ops():
            _taken.extend((op, key, op.py_kernels.pop(key)) for key in _KEYS if key in op.py_kernels)
            if op._overloadname == "vec":
                op.py_kernels[DispatchKey.CompositeImplicitAutograd] = _by_kernel(op.overloadpacket.default)
            op._dispatch_cache.clear()
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            while _taken:
                op, key, version = _taken.pop()
                op.py_kernels[key] = version
                op._dispatch_cache.clear()

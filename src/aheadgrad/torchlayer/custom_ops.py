"""What was registered in Python for an op: kernels and derivatives that decide what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._library.simple_registry import singleton

from aheadgrad.torchlayer.dispatch import OpOverload, OpOverloadPacket

__all__ = ["CustomOpDef", "op_of", "registered", "replaced_kernels"]
_OWN = set("aten prim prims rngprims debugprims inductor higher_order".split())
_FUNCTIONS = (
    "_abstract_fn",
    "_setup_context_fn",
    "_backward_fn",
    "_torch_dispatch_fns",
    "_vmap_fn",
    "_autocast_dtype",
)
_HARMLESS = {"Meta", "CPU", "CUDA", "MPS", "XPU", "BackendSelect"}  # these run when the program runs


def op_of(defined: CustomOpDef) -> OpOverload:
    op: OpOverload = defined._opoverload
    return op


def registered(op: Any) -> list[Any]:
    """The functions of an op that is not torch's. What was given to the dispatcher as such is known by its
    key alone: a function that ran and that is not among these has no way to it that could be compared."""
    if not isinstance(op, OpOverload | OpOverloadPacket):
        return []
    overloads = [getattr(op, name) for name in op.overloads()] if isinstance(op, OpOverloadPacket) else [op]
    return [part for one in overloads if one.namespace not in _OWN for part in _parts(one)]


def _parts(op: Any) -> Iterator[Any]:
    namespace, _, name = op.name().partition("::")
    yield str(op._schema)
    starts = f"{namespace}/{name}/", f"{namespace}/{name}.default/"
    yield sorted(key for key in torch.library._impls if key.startswith(starts))
    yield [(str(key), function) for key, function in op.py_kernels.items() if callable(function)]
    defined = OPDEFS.get(op.name())
    if defined is not None:
        yield [getattr(defined, name) for name in _FUNCTIONS]
    kept = singleton._data.get(op.name())
    yield [kernel.func for kernel in kept.fake_impl.kernels] if kept and not defined else []


def replaced_kernels() -> list[str]:
    """What somebody has registered in Python for ops of torch's own, and that decides what is recorded."""
    keys = [key.split("/") for key in torch.library._impls if key.startswith("aten/")]
    return sorted("/".join(parts) for parts in keys if parts[-1] not in _HARMLESS)

"""What was registered in Python for an op: kernels and derivatives that decide what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._library.simple_registry import singleton

from aheadgrad.torchlayer.dispatch import OpOverload, OpOverloadPacket

__all__ = ["CustomOpDef", "hidden", "op_of", "registered", "replaced_kernels"]
_OWN = set(
    "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized aten c10d c10d_functional "
    "debug_mode_ops debugprims export flex_lib fsdp higher_order inductor inductor_prims mkl mkldnn "
    "mkldnn_prepacked onednn onnx onnx_symbolic prim prims profiler quantization quantized "
    "quantized_decomposed rngprims sparse static_runtime streams symm_mem".split()
)
_FUNCTIONS = (
    "_abstract_fn",
    "_setup_context_fn",
    "_backward_fn",
    "_torch_dispatch_fns",
    "_vmap_fn",
    "_autocast_dtype",
    "_autocast_cpu_dtype",  # torch 2.11
    "_autocast_cuda_dtype",
)
_HARMLESS = {"Meta", "CPU", "CUDA", "MPS", "XPU", "BackendSelect"}  # these run when the program runs
_HARMLESS |= {
    "FuncTorchBatched",
    "FuncTorchBatchedDecomposition",
}  # torch registers these when `vmap` is used


def op_of(defined: CustomOpDef) -> OpOverload:
    op: OpOverload = defined._opoverload
    return op


def registered(op: Any) -> list[Any]:
    """The functions of an op that is not torch's. Empty for torch's own."""
    return [part for one in _of_others(op) for part in _parts(one)]


def hidden(op: Any) -> list[str]:
    """What was registered for an op with the dispatcher alone, which does not give it back: the key of each
    kernel that decides what is recorded."""
    names = [one.name() for one in _of_others(op)]
    return [key for name in names if name not in OPDEFS for key in _keys(name) if _decides(key)]


def replaced_kernels() -> list[str]:
    """What somebody has registered in Python for ops of torch's own, and that decides what is recorded."""
    return sorted(key for key in torch.library._impls if key.startswith("aten/") and _decides(key))


def _of_others(op: Any) -> list[Any]:
    if not isinstance(op, OpOverload | OpOverloadPacket):
        return []
    overloads = [getattr(op, name) for name in op.overloads()] if isinstance(op, OpOverloadPacket) else [op]
    return [one for one in overloads if one.namespace not in _OWN]


def _parts(op: Any) -> Iterator[Any]:
    yield str(op._schema)
    yield _keys(op.name())
    yield [(str(key), function) for key, function in op.py_kernels.items() if callable(function)]
    defined = OPDEFS.get(op.name())
    if defined is not None:
        yield [getattr(defined, name, None) for name in _FUNCTIONS]
    kept = singleton._data.get(op.name())
    yield [kernel.func for kernel in kept.fake_impl.kernels] if kept and not defined else []


def _keys(name: str) -> list[str]:
    start = name.replace("::", "/")
    return sorted(key for key in torch.library._impls if key.startswith((f"{start}/", f"{start}.default/")))


def _decides(key: str) -> bool:
    return key.rpartition("/")[2] not in _HARMLESS

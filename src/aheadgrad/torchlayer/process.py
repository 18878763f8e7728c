"""What a process is like, as far as a recording may depend on it: versions, devices, switches."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.autocast import autocast_state
from aheadgrad.torchlayer.autograd import kind_of_view
from aheadgrad.torchlayer.dispatch import (
    default_devices,
    deterministic_mode,
    deterministic_warns,
    function_modes,
)

_MARKS = ("_dynamo_", "_is_hf_initialized")  # what others note on tensors: sizes are told, and checked


@functools.cache
def own_version() -> str:
    """Of aheadgrad, and of each of its files: who changes one of them has another version."""
    root = Path(__file__).parents[1]
    found = sorted(root.rglob("*.py"))
    told = [(str(path.relative_to(root)), (now := path.stat()).st_size, now.st_mtime_ns) for path in found]
    return hashlib.sha256(str(told).encode()).hexdigest()


def memory_of(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__} {torch.version.git_version}"
    for name in ("numpy", "opt_einsum"):
        yield name, str(getattr(sys.modules.get(name), "__version__", ""))


def devices(kinds: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The hardware that programs are for."""
    yield "processor", f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    for kind in sorted(set(kinds) - {"cpu", "meta"}):
        if kind == "cuda":
            found = {str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())}
            yield kind, f"{torch.version.cuda} {torch.version.hip} {sorted(found)}"
        else:
            yield kind, platform.node()  # not known well enough to be told from others of its kind


def switches() -> Iterator[tuple[str, str]]:
    """Global settings of torch, also those that only the user's code may ask for."""
    backends = torch.backends
    yield "grad mode", str(torch.is_grad_enabled())
    yield "inference mode", str(torch.is_inference_mode_enabled())
    yield "autocast", str(autocast_state())
    yield "the default dtype", str(torch.get_default_dtype())
    yield "the default device", f"{function_modes()} {default_devices()}"
    yield "deterministic algorithms", f"{deterministic_mode()} {deterministic_warns()}"
    yield "kernels for attention", str(attention_kernels())
    yield "threads", str(torch.get_num_threads())
    yield "precision of products", torch.get_float32_matmul_precision()
    flags = backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.allow_tf32
    yield "cuDNN", str(flags)
    yield (
        "cuBLAS",
        f"{backends.cuda.matmul.allow_tf32} {backends.cuda.matmul.allow_fp16_reduced_precision_reduction}",
    )
    yield "oneDNN", str(torch._C._get_mkldnn_enabled())
    yield "numpy's errors", str(sys.modules["numpy"].geterr() if "numpy" in sys.modules else "")
    yield "warnings that are raised", str([one for one in warnings.filters if one[0] == "error"])
    yield "anomaly mode", str(torch.is_anomaly_enabled())
    yield "devices", f"{torch.cuda.is_available()} {torch.accelerator.device_count()}"


def look_of(t: Tensor) -> str:
    """All that a recording may see of a plain tensor."""
    kind = type(t)
    shape = t.dtype, t.device, tuple(t.shape), t.stride(), t.storage_offset(), t.layout
    grad = t.requires_grad, t.is_leaf, t.is_leaf and t.grad is not None, kind_of_view(t)
    flags = t.is_conj(), t.is_neg(), t.is_inference(), hasattr(t, "_dynamo_static_input_type")
    return f"{kind.__module__}.{kind.__qualname__} {shape} {grad} {flags}"


def noted_on(t: Tensor) -> dict[str, object]:
    """Attributes that somebody gave to a tensor."""
    found = vars(t) if hasattr(t, "__dict__") else {}
    return {key: value for key, value in found.items() if not key.startswith(_MARKS)}

"""Which kernels `scaled_dot_product_attention` may choose from (`torch.nn.attention.sdpa_kernel`)."""

from __future__ import annotations

from typing import Any

import torch

_SWITCHES = [
    getattr(torch._C, name)
    for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    if hasattr(torch._C, name := f"_get_{kind}_sdp_enabled")
]
_ORDER = getattr(torch._C, "_get_sdp_priority_order", tuple)


def attention_kernels() -> tuple[Any, ...]:
    return (*(switch() for switch in _SWITCHES), *_ORDER())

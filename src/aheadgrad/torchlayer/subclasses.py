"""Which tensors are plain: strided memory, no Python-level behaviour of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from aheadgrad.torchlayer.fake import FakeTensor

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def is_plain(t: Tensor) -> bool:
    if type(t) in _PLAIN:
        return True
    return type(t).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl

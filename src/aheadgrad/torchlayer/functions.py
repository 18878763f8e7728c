"""Functions of torch with an underscore that recordings call in place of public ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

batch_norm_legit: Any = torch._native_batch_norm_legit
batch_norm_in_eval: Any = torch._native_batch_norm_legit_no_training
assert_async: Any = torch._assert_async
verify_batch_size: Any = functional._verify_batch_size  # type: ignore[attr-defined]
verify_spatial_size: Any = functional._verify_spatial_size  # type: ignore[attr-defined]
silu: Any = torch._C._nn.silu

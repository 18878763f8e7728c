"""torch's own subclass for tests: two tensors of the same shape, each op done on both."""

from __future__ import annotations

from torch.testing._internal.two_tensor import TwoTensor

__all__ = ["TwoTensor"]

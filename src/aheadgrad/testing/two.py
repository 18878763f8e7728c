"""Inputs of generated programs as tensors in two parts: ``two.tensor`` instead of ``torch.tensor``.

>>> x = tensor([1.0, 2.0], requires_grad=True)
>>> x.a, x.b
(tensor([1., 2.]), tensor([0.5000, 1.5000]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aheadgrad.torchlayer.two_tensor import TwoTensor

# What torch does to such tensors in second derivatives, and no program is to blame for: its helper for
# subclasses fails on zeros that autograd makes (of `abs`), and conjugation is lost inside of them.
DEFECTS = ("Attempted to set the storage of a tensor on device", "a lazily conjugated tensor")


def of(a: Tensor, requires_grad: bool = False) -> Tensor:
    """A tensor in two parts, the second a little different from the first."""
    other = torch.empty_strided(a.size(), a.stride(), dtype=a.dtype).copy_(a)
    other -= 0.5 if a.is_floating_point() else 1
    both: Tensor = TwoTensor(a, other)
    return both.requires_grad_() if requires_grad else both


def tensor(data: Any, requires_grad: bool = False, **options: Any) -> Tensor:
    return of(torch.tensor(data, **options), requires_grad)


def zeros(size: Any, requires_grad: bool = False, **options: Any) -> Tensor:
    return of(torch.zeros(size, **options), requires_grad)

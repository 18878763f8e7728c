"""Dimensions of one element beside symbolic sizes: strides are eager's, and a new size needs no new entry."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.common import assert_equal, leaf, strict

SIZES = (22, 5, 7, 2, 3, 9, 64, 1, 4)


def strides(value: Any) -> list[Any]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [t.stride() if isinstance(t, Tensor) else t for t in parts]


def same_strides(
    fn: Callable[..., Any],
    make: Callable[[int], tuple[Tensor, ...]],
    *,
    sizes: tuple[int, ...] = SIZES,
    entries: int = 3,
) -> None:
    """Results, strides and gradients for all sizes; one entry for the first, one for all, one for size 1."""
    compiled = strict(fn)
    for n in sizes:
        given, other = make(n), make(n)
        expected, found = fn(*given), compiled(*other)
        assert strides(expected) == strides(found), n
        assert_equal(expected, found, f"size {n}")
        parts = expected if isinstance(expected, list | tuple) else [expected]
        if not any(isinstance(t, Tensor) and t.requires_grad for t in parts):
            continue
        for out in (expected, found):
            parts = out if isinstance(out, list | tuple) else [out]
            sum(t.square().sum() for t in parts if isinstance(t, Tensor) and t.requires_grad).backward()
        for a, b in zip(given, other, strict=True):  # sums of gradients may be taken in another order
            torch.testing.assert_close(a.grad, b.grad, msg=f"gradients, size {n}")
    assert len(compiled.entries) <= entries, compiled.misses


ONE: dict[str, Callable[[Tensor], Any]] = {
    "times a number": lambda x: x.unsqueeze(-1).transpose(1, 2) * 0.5,
    "twice": lambda x: (x.unsqueeze(-1).transpose(1, 2) * 0.5).transpose(0, 1) + 1,
    "times itself": lambda x: x.unsqueeze(-1).transpose(1, 2) * x.unsqueeze(1),
    "expanded": lambda x: x[:, None, :].expand(-1, 4, -1)[:, :1] * 2,
    "sum kept": lambda x: x.t().sum(0, keepdim=True).transpose(0, 1) * 2,
    "norm kept": lambda x: x / x.norm(dim=-1, keepdim=True).t().t().clamp_min(0.1),
    "permuted": lambda x: x[:, :, None, None].permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1) / 3,
    "outer product": lambda x: torch.einsum("ni,nj->nij", x, x[:, :1]),
    "inner product": lambda x: torch.einsum("nci,ncj->nij", x[:, None], x[:, None]),
    "products of irreps": lambda x: torch.einsum("zui,zvj->zuvij", x[:, None], x.unsqueeze(-1).mT),
    "cat": lambda x: torch.cat([x[:, None].transpose(0, 1), x[None]], 0).sum(0, keepdim=True).exp(),
    "choice": lambda x: torch.where(x.t()[None] > 0, x.t()[None], x.new_zeros(())),
    "stacked": lambda x: torch.stack([x[:, 0], x[:, 1]], -1)[:, None].transpose(0, 1).sin(),
    "softmax": lambda x: F.softmax(x[:, None].transpose(0, 2), dim=2) * 2,
    "layer norm": lambda x: F.layer_norm(x[:, None].transpose(0, 1), (3,)) * 2,
    "shows strides": lambda x: (x.unsqueeze(-1).transpose(1, 2) * 0.5 + x.unsqueeze(1)).mT.contiguous(),
    "reads a stride": lambda x: x * (x.unsqueeze(-1).transpose(1, 2) * 0.5).stride(1),
    "in place": lambda x: x.unsqueeze(-1).transpose(1, 2).clone().mul_(2).add_(1),
    "gate": lambda x: torch.sigmoid(x[:, :1]).unsqueeze(-1).transpose(0, 1) * x[None],
    "matmul": lambda x: (x[:, None] @ x.new_ones(3, 1)).transpose(0, 1) * 2,
    "index": lambda x: x.unsqueeze(1)[torch.arange(x.shape[0])].transpose(0, 1) * 2,
    "half of it": lambda x: x[:, None, ::2].transpose(1, 2).neg().mul(3),
    "cumulated": lambda x: x[None].transpose(0, 1).cumsum(0).transpose(1, 2) * 2,
    "both kept": lambda x: (x - x.mean((0, 1), keepdim=True)) / (x.var(1, keepdim=True) + 1),
}


@pytest.mark.parametrize("layout", ["rows", "columns", "part"])
@pytest.mark.parametrize("name", ONE)
def test_strides_of_unit_sizes(name: str, layout: str) -> None:
    def make(n: int) -> tuple[Tensor, ...]:
        if layout == "rows":
            return (leaf(n, 3),)
        if layout == "columns":
            return (leaf(3, n).detach().t().requires_grad_(),)
        return (leaf(n, 7).detach()[:, 1:7:2].requires_grad_(),)

    same_strides(ONE[name], make)


def test_two_sizes_that_are_equal_by_accident() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x[:, None].transpose(0, 1) * 2, y.t()[None] * 3, x.sum(0, keepdim=True).T + y.sum(0)[None].T

    compiled = strict(fn)
    for a, b in ((4, 4), (6, 6), (6, 4), (5, 7), (3, 3), (2, 9), (9, 2), (8, 8)):
        x, y = leaf(a, 3), leaf(b, 3)
        assert strides(fn(x, y)) == strides(compiled(x, y))
        assert_equal(fn(x, y), compiled(x, y), f"{a}, {b}")
    assert len(compiled.entries) <= 3, compiled.misses


def test_an_order_in_memory_that_depends_on_the_size() -> None:
    """A unit dimension has a size for its stride: less or more than another, and so further in or out."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return y.as_strided((2, 1, 4), (4, x.shape[0], 1)) * 2

    compiled = strict(fn, max_entries=32)
    for n in (2, 3, 4, 5, 6, 9, 3, 2):
        x, y = torch.ones(n), torch.arange(16.0)
        assert fn(x, y).stride() == compiled(x, y).stride(), n
        assert_equal(fn(x, y), compiled(x, y))


def test_channels_last() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        kept = x.mean((2, 3), keepdim=True)
        return kept, x * kept, x[:, :1] * 2, x[:, :, :1].relu(), kept.sigmoid() * x[:, :1]

    def make(n: int) -> tuple[Tensor, ...]:
        return (leaf(n, 3, 4, 4).detach().to(memory_format=torch.channels_last).requires_grad_(),)

    same_strides(fn, make)


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.transpose(0, -1),
    lambda t: t.unsqueeze(0),
    lambda t: t.unsqueeze(-1),
    lambda t: t.unsqueeze(1),
    lambda t: t.flip(0),
    lambda t: t.movedim(0, 1) if t.dim() > 1 else t,
    lambda t: t.sum(-1, keepdim=True) if t.dim() > 2 else t,
    lambda t: t.sum(0, keepdim=True) if t.dim() > 2 else t,
    lambda t: t.squeeze(),
    lambda t: t * 0.5,
    lambda t: t + t.detach().clone(),
    lambda t: torch.exp(-t),
    lambda t: t.contiguous(),
    lambda t: t.amax(0, keepdim=True) * t,
    lambda t: t.clone().add_(1),
    lambda t: t[..., :1] * t,
    lambda t: torch.cat([t, t], -1).narrow(-1, 0, t.shape[-1]),
]


@pytest.mark.parametrize("seed", range(16))
def test_programs_of_views_and_small_ops(seed: int) -> None:
    chosen = random.Random(seed).choices(STEPS, k=6)

    def fn(x: Tensor) -> list[Tensor]:
        found = [x]
        for step in chosen:
            if found[-1].dim() < 5:
                found.append(step(found[-1]))
        return [t * 1 for t in found[1:]]

    same_strides(fn, lambda n: (leaf(n, 3, dtype=torch.float64),), entries=4)

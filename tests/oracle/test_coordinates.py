"""Derivatives by coordinates that a network stacks or joins are eager's to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aheadgrad


def _stacked(*parts: Tensor) -> Tensor:
    return torch.stack(parts, dim=-1)


def _first_dimension(*parts: Tensor) -> Tensor:
    return torch.stack(parts, dim=0).t()


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat([p[:, None] for p in parts], dim=1)


def _wide(*parts: Tensor) -> Tensor:
    return torch.cat([p.reshape(-1, 2).repeat_interleave(2, 0) for p in parts], dim=-1)


JOINS: dict[str, Callable[..., Tensor]] = {
    "stack": _stacked,
    "first": _first_dimension,
    "cat": _joined,
    "wide": _wide,
}


def _bits(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().contiguous().view(torch.int32)


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("wanted", ["all", "first", "last"])
def test_second_derivatives_of_coordinates(join: str, count: int, wanted: str) -> None:
    width = 2 * count if join == "wide" else count
    weight = torch.randn(width, 5)

    def energy(*parts: Tensor) -> Tensor:
        return torch.tanh(JOINS[join](*parts) @ weight).sum(-1)

    found = []
    for fn in (energy, aheadgrad.compile(energy, frontend="trace", backend="eager", fallback="error")):
        torch.manual_seed(0)
        leaves = [torch.randn(8, requires_grad=True) for _ in range(count)]
        with torch.no_grad():
            leaves[0][:3] = 0.0
        by = {"all": leaves, "first": leaves[:1], "last": leaves[-1:]}[wanted]
        first = torch.autograd.grad(fn(*leaves).sum(), by, create_graph=True)
        factors = [torch.tensor([1.0, -0.0, 0.0, -1.0, 2.0, -0.0, float("inf"), float("nan")])] * len(by)
        again = torch.autograd.grad(first, leaves, factors, create_graph=True, allow_unused=True)
        last = torch.autograd.grad([g.nansum() for g in again if g is not None], leaves, allow_unused=True)
        found.append([*map(_bits, first), *map(_bits, again), *map(_bits, last)])
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        assert expected is None or torch.equal(expected, got)

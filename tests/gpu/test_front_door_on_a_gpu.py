"""Both front ends on a GPU, against eager: run where there is one."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle.test_backwards_that_meet import (
    both,
    energy,
    given,
    tangents_from_results,
    third_without_second,
)
from oracle.test_wanted_gradients import Counting
from torch import Tensor, nn

import aheadgrad

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x)))


def train(way: Any, model: nn.Module, *, autocast: bool) -> list[Tensor]:
    """Three steps with batches of other sizes; losses and parameters."""
    run = way(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for i, n in enumerate((16, 16, 24)):
        torch.manual_seed(i)
        x = torch.randn(n, 8, device="cuda")
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss = run(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return [*seen, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_training(frontend: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    expected = train(lambda m: m, copy.deepcopy(model), autocast=autocast)
    found = train(
        lambda m: aheadgrad.compile(m, frontend=frontend, fallback="error"), model, autocast=autocast
    )
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_forces_of_molecules_of_any_size(frontend: str) -> None:
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).cuda().double()

    def energy(positions: Tensor) -> Tensor:
        distances = (positions[:, None] - positions[None]).square().sum(-1, keepdim=True)
        return net(torch.exp(-distances)).sum()

    fast = aheadgrad.compile(energy, frontend=frontend, fallback="error")
    for n in (3, 5, 4, 7):
        grads = []
        for run in (energy, fast):
            torch.manual_seed(n)
            positions = torch.randn(n, 3, device="cuda", dtype=torch.float64, requires_grad=True)
            (force,) = torch.autograd.grad(run(positions), positions, create_graph=True)
            net.zero_grad()
            force.square().mean().backward()
            grads.append([force.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    assert len(fast.entries) <= 3


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_sizes_that_values_decide(frontend: str) -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return (x[mask] ** 2).sum()

    fast = aheadgrad.compile(masked, frontend=frontend)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(10, device="cuda", requires_grad=True)
        mask = torch.rand(10, device="cuda") > 0.4
        (expected,) = torch.autograd.grad(masked(x, mask), x)
        (found,) = torch.autograd.grad(fast(x, mask), x)
        assert torch.equal(expected, found)


@pytest.mark.parametrize("loss", [both, tangents_from_results, third_without_second])
def test_a_backward_of_gradients_runs_no_more_products_than_in_eager(loss: Any) -> None:
    counts = []
    for fn in (energy, aheadgrad.compile(energy, frontend="trace", backend="eager", fallback="error")):
        with Counting() as counting:
            for _ in range(3):
                tensors = [t.detach().cuda().requires_grad_() for t in given()]
                for _ in range(20):  # the engine's thread numbers nodes by itself
                    fn(*tensors)
                counting.ops.clear()
                loss(fn, *tensors).backward()
        counts.append(counting.ops.count("aten.mm.default"))
    assert 0 < counts[1] <= counts[0]

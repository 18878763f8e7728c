"""The Inductor backend on a GPU, against eager: run where there is one."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


def convolutions() -> nn.Module:
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(8 * 36, 4))


def losses(run: Any, model: nn.Module, x: Tensor, *, autocast: bool) -> list[Any]:
    seen: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(4):
        torch.manual_seed(i)
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss = run(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return [*seen, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["attention", "convolutions"])
def test_training(kind: str, autocast: bool, mode: str | None, frontend: str) -> None:
    torch.manual_seed(0)
    model = (Block() if kind == "attention" else convolutions()).cuda()
    x = torch.randn(*((2, 16, 64) if kind == "attention" else (2, 3, 8, 8)), device="cuda")
    other = copy.deepcopy(model)
    run = aheadgrad.compile(model, backend="inductor", mode=mode, frontend=frontend, fallback="error")
    ours, theirs = losses(run, model, x, autocast=autocast), losses(other, other, x, autocast=autocast)
    tolerance = 3e-2 if autocast else 3e-3
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_second_order(mode: str | None, frontend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 1)).cuda()
    run = aheadgrad.compile(model, backend="inductor", mode=mode, frontend=frontend, fallback="error")
    weights = list(model.parameters())
    for i in range(5):
        x = torch.randn(16, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(i))
        x.requires_grad_()
        found = []
        for fn in (run, model):
            out = fn(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = (slope.norm(dim=-1) - 1).square().mean() + out.square().mean()
            grads = torch.autograd.grad(loss, weights)
            found.append([g.clone() for g in grads])
        torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_memory_of_a_step_is_no_more_than_eagers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    peaks = []
    for run in (model, aheadgrad.compile(model, backend="inductor")):
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            run(x).square().mean().backward()
            model.zero_grad(set_to_none=True)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.02 * peaks[0]


def test_a_profiler_sees_kernels_that_were_launched_before() -> None:
    run = aheadgrad.compile(lambda x: (x.sin() * 2).exp(), backend="inductor", fallback="error")
    x = torch.randn(1000, device="cuda")
    for _ in range(3):
        run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out = run(x)
    torch.testing.assert_close(out, (x.sin() * 2).exp())
    assert any(event.key.startswith("triton_") for event in seen.key_averages())

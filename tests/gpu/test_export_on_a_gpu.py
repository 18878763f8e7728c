"""Exports of what runs on a GPU: training steps and gradients as eager's, files that come back to the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "capturable adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
}


def make(name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)).cuda()
    optimizer = OPTIMIZERS[name](model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8, device="cuda"), torch.randn(6, 4, device="cuda")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps(name: str, tmp_path: Path) -> None:
    (model, eager), (_, ours) = make(name), make(name)
    aheadgrad.export(ours, batch()).save(tmp_path / "step.ag")
    exported = aheadgrad.load(tmp_path / "step.ag")
    assert all(p.is_cuda for p in exported.parameters.values())
    for seed in range(5):
        given = batch()
        torch.manual_seed(seed)
        found = exported.run(*given)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, eager(*given), rtol=0, atol=0)
    for n, t in model.state_dict().items():
        torch.testing.assert_close(exported.state[f"model.{n}"].detach(), t, rtol=0, atol=0)


@pytest.mark.parametrize("partition", [None, "min_cut"])
def test_gradients(partition: str | None) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).cuda()

    def fn(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out.square().mean()

    x = torch.randn(2, 5, 16, device="cuda")
    exported = aheadgrad.export(fn, (x,), loss=0, partition=partition)
    for running in (exported.compile("eager"), exported.compile("inductor")):
        torch.manual_seed(1)
        step = running(x)
        torch.manual_seed(1)
        loss = fn(x)
        torch.testing.assert_close(step.output, loss.detach(), rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        found = [step.gradients[f"model.{n}"] for n, _ in model.named_parameters()]
        torch.testing.assert_close(found, list(grads), rtol=1e-3, atol=1e-5)

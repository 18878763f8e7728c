"""On a GPU: gradients are eager's at every budget, and random numbers that are drawn again are the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aheadgrad

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 16))


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(layer(x).tanh(), 0.3)
        return x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = mlp(), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).sin().softmax(-1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False)).tanh()


def trained(make: Callable[[], nn.Module], order: int, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = make().to("cuda", torch.float64)
    x = torch.randn(64, 16, dtype=torch.float64, device="cuda", requires_grad=True)
    run = aheadgrad.compile(model, fallback="error", frontend="trace", **options) if options else model
    torch.manual_seed(1)
    out = run(x)
    if order == 2:
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        out = out.sum() + slope.square().sum()
    out.sum().backward()
    grads = [p.grad for p in (x, *model.parameters())]
    return [out.detach(), *grads, *model.buffers(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("make", [Dropout, Normed, Checkpointed])
def test_equal_at_every_budget(make: Callable[[], nn.Module], order: int) -> None:
    expected = trained(make, order)
    for budget in (0.0, 0.25, 0.5, 0.75, 1.0):
        torch.testing.assert_close(trained(make, order, memory_budget=budget), expected)
    torch.testing.assert_close(trained(make, order, memory="less"), expected)

"""Models whose backwards draw random numbers again, update buffers or have regions; a step of training."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aheadgrad

BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)


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
        self.inner, self.norm, self.layer_norm = mlp(), nn.BatchNorm1d(16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(self.norm(self.inner(x)).sin()).softmax(-1)


class Checkpointed(nn.Module):
    """Two regions, one after the other, and ordinary ops around them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = mlp(), mlp(), nn.Linear(16, 16)
        self.options = {"use_reentrant": False} | options

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.first, x, **self.options)
        return self.last(checkpoint(self.second, y, **self.options)).tanh()


def trained(make: Callable[[], nn.Module], order: int, device: str = "cpu", **options: Any) -> list[Any]:
    """Gradients, buffers and the state of the generator after a step; compiled if there are options."""
    torch.manual_seed(0)
    dtype = torch.float32 if order == 1 else torch.float64
    model = make().to(device, dtype)
    x = torch.randn(32, 16, dtype=dtype, device=device, requires_grad=True)
    run = aheadgrad.compile(model, fallback="error", **options) if options else model
    torch.manual_seed(1)
    out = run(x)
    if order == 2:
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        out = out.sum() + slope.square().sum()
    out.sum().backward()
    grads = [p.grad for p in (x, *model.parameters())]
    return [out.detach(), *grads, *model.buffers(), _state(device)]


def _state(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()

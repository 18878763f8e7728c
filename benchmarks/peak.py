"""The most memory that one backward needs: every allocation of the step, kernels' own included.

Saved tensors are freed as the backward goes, as eager frees them node by node.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.testing.peak import peak_of_backward

from . import peer
from .measure import EAGER, OURS, TORCH, TRACING, Bar, Row
from .models import CASES, Case

LIMIT = 1.05
WARM_UP = 2  # compile first, so that nothing of the capture is counted


class DeepNet(nn.Module):
    """Layers as wide as the batch is large: what is saved weighs as much as the gradients."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result.square().mean()


def deep_net(layers: int = 20, width: int = 64) -> Case:
    torch.manual_seed(0)
    return Case(f"MLP, {layers} layers", DeepNet(layers, width), (torch.randn(width, width),))


def kilobytes(case: Case, compile_model: Callable[[nn.Module], Callable[..., Tensor]]) -> float:
    model = case.fresh()
    forward = compile_model(model)
    for _ in range(WARM_UP):
        forward(*case.inputs).backward()
        model.zero_grad()
    return peak_of_backward(lambda: forward(*case.inputs)) / 1024


def run() -> list[Row]:
    rows = []
    for make in (deep_net, *CASES):
        case = make()
        figures = {
            EAGER: kilobytes(case, lambda model: model),
            TORCH: kilobytes(case, peer.compile_module),
            TRACING: kilobytes(case, lambda model: aheadgrad.compile(model, frontend="trace")),
            OURS: kilobytes(case, aheadgrad.compile),
        }
        rows.append(Row(f"backward's peak, {case.name}", "KiB", figures, (Bar(EAGER, LIMIT),)))
    return rows

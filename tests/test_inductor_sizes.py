"""Inductor and sizes that are not known before the call: symbols, and numbers that values decide."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.torchlayer.inductor import missing

pytestmark = pytest.mark.skipif(missing("cpu") is not None, reason="needs a C++ compiler")


def fast(fn: Any, **options: Any) -> Any:
    return aheadgrad.compile(fn, **{"fallback": "error", "backend": "inductor", **options})


def results(fn: Any, order: int, *args: Any) -> list[Tensor]:
    """Values and gradients, to some order."""
    x = args[0].detach().requires_grad_()
    found = [fn(x, *args[1:])]
    for k in range(order):
        total = found[-1].square().sum()
        found += torch.autograd.grad(total, x, create_graph=k + 1 < order)
    return found


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frontend", [pytest.param("dynamo", marks=pytest.mark.zoo), "trace"])
def test_kept_values_of_any_size_are_laid_out_by_symbols(frontend: str) -> None:
    """The strides that the backward is compiled for are not those of the first call."""
    torch.manual_seed(0)
    weight = torch.randn(8, 4)

    def fn(x: Tensor) -> Tensor:
        h = (x.transpose(0, 1) @ weight).contiguous()
        return F.softmax(h, -1).transpose(0, 1) * x[..., :4]

    compiled = fast(fn, dynamic=True, frontend=frontend)
    for sizes in ((2, 5), (3, 7), (6, 4)):
        x = torch.randn(*sizes, 8)
        same(results(compiled, 1, x), results(fn, 1, x))
    assert len(compiled.entries) == 1


@pytest.mark.parametrize("frontend", [pytest.param("dynamo", marks=pytest.mark.zoo), "trace"])
def test_what_a_backward_assumes_of_sizes_is_checked_when_it_is_called(frontend: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3, stride=2)

    def fn(x: Tensor) -> Tensor:
        return F.max_pool2d(conv(x).relu(), 2)

    for _ in range(2):  # the second finds all in Inductor's cache
        torch._dynamo.reset()
        compiled = fast(fn, dynamic=True, frontend=frontend)
        for n, size in ((2, 12), (3, 17), (2, 12), (4, 20), (70, 17)):
            x = torch.randn(n, 1, size, size)
            same(results(compiled, 1, x), results(fn, 1, x))


MASKED: dict[str, Any] = {
    "rows": lambda x, m: x[m].sin() * x[m],
    "matrices": lambda x, m: (x[m] @ x.exp().t()).tanh() @ x,
    "places": lambda x, m: x[m.nonzero()[:, 0]].exp() * x.sum(),
}


@pytest.mark.parametrize(
    ("name", "order"),
    [("rows", 1), *(pytest.param(name, 2, marks=pytest.mark.zoo) for name in MASKED)],
)
def test_sizes_that_values_decide(name: str, order: int) -> None:
    fn = MASKED[name]
    compiled = fast(fn, frontend="trace")
    for count in (3, 0, 5, 1):
        x, mask = torch.randn(5, 4), torch.arange(5) < count
        same(results(compiled, order, x, mask), results(fn, order, x, mask))
    assert "op by op" not in compiled.explain()
    assert len(compiled.entries) == 1


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=True)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_a_whole_step_that_reads_its_counters_is_compiled(tmp_path: Path) -> None:
    """Warnings are errors: nothing runs op by op."""
    trainer = Trainer()
    batches = [(torch.randn(6, 3), torch.randn(6, 2)) for _ in range(3)]
    aheadgrad.export(copy.deepcopy(trainer).step, batches[0]).save(tmp_path / "step.ag")
    step = aheadgrad.load(tmp_path / "step.ag").compile("inductor")
    for batch in batches:
        same(step(*batch), trainer.step(*batch))

"""The backward that was recorded with the forward is the one that runs, also for an expanded tangent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.recording.door import LiveDoor

from .common import default, leaf, strict


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that is recorded in addition."""
    asked: list[Any] = []
    more = LiveDoor.more

    def counted(self: LiveDoor, request: Any) -> Any:
        asked.append(request)
        return more(self, request)

    monkeypatch.setattr(LiveDoor, "more", counted)
    return asked


def _module(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "pointwise": (lambda x: (x * 2).sin().exp(), (3, 4)),
    "passed on": (lambda x: x + 1, (3, 4)),
    "products": (lambda x: torch.tanh(x @ x.t()), (3, 4)),
    "softmax": (lambda x: F.softmax(x, -1), (3, 4)),
    "norm": (lambda x: F.layer_norm(x, (4,)), (3, 4)),
    "another shape": (lambda x: (x * 2).view(12), (3, 4)),
    "copied": (lambda x: (x * 2).transpose(1, 2).reshape(8, 3), (2, 3, 4)),
    "joined": (lambda x: torch.cat([x, x * 2]), (3, 4)),
    "expanded": (lambda x: x.expand(2, 3, 4) * 2, (3, 4)),
    "converted": (lambda x: x.double().sin(), (3, 4)),
    "sums": (lambda x: x.cumsum(0), (3, 4)),
    "dropped": (lambda x: F.dropout(x, 0.5), (3, 4)),
    "scalar": (lambda x: x.sin().sum(), (3, 4)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 2, 3, 4)),
    "linear": (_module(lambda: nn.Linear(4, 5)), (2, 3, 4)),
    "layers": (_module(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))), (5, 4)),
    "convolution": (_module(lambda: nn.Conv2d(3, 4, 3)), (2, 3, 8, 8)),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": Tensor.sum,
    "mean": Tensor.mean,
    "weighted": lambda out: (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum(),
    "by rows": lambda out: out.sum(-1).square().sum() if out.dim() else out,
}


def gradients(run: Any, module: Any, shape: Any, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    x = leaf(*shape)
    inputs = [x, *(module.parameters() if isinstance(module, nn.Module) else ())]
    return list(torch.autograd.grad(loss(run(x)), inputs))


def assert_same_gradients(expected: list[Tensor], found: list[Tensor]) -> None:
    for e, f in zip(expected, found, strict=True):
        assert torch.equal(e, f)
        assert e.stride() == f.stride()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compile", [strict, default])
def test_one_recording_serves(compile: Any, case: str, loss: str, recordings: list[Any]) -> None:
    torch.compiler.reset()
    fn, shape = CASES[case]
    compiled = compile(fn)
    for _ in range(2):
        expected = gradients(fn, fn, shape, LOSSES[loss])
        assert_same_gradients(expected, gradients(compiled, fn, shape, LOSSES[loss]))
    assert not recordings


def test_two_outputs(recordings: list[Any]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y * 2

    compiled = strict(fn)
    for _ in range(2):
        found = []
        for run in (fn, compiled):
            x = leaf(3, 4)
            found.append(list(torch.autograd.grad([o.sum() for o in run(x)], x)))
        assert_same_gradients(*found)
    assert not recordings


def test_some_of_the_gradients(recordings: list[Any]) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).sin()

    compiled = strict(fn)
    found = []
    for run in (fn, compiled):
        x, y = leaf(3, 3), leaf(3, 3, seed=1)
        found.append(list(torch.autograd.grad(run(x, y).sum(), [y])))
    assert_same_gradients(*found)
    assert not recordings


# ---- where it does not serve ----------------------------------------------------------------------


class Asks(torch.autograd.Function):
    """A backward of the user's that takes another way for an expanded gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 if grad.is_contiguous() else 3)


OTHERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "asked by the user": (lambda x: Asks.apply(x), (3, 4)),
    "asked by torch": (_module(lambda: nn.GroupNorm(2, 4)), (2, 4, 3)),
    "laid out by the other": (lambda x: x.t() * 2, (3, 4)),
    "laid out as it came": (lambda x: (x * 2).permute(2, 0, 1).reshape(4, 6), (2, 3, 4)),
    "a copy, or a view": (lambda x: (x * 2).view(2, 6), (3, 4)),
    "a view that cannot be": (lambda x: x.unsqueeze(0).expand(2, 3, 4).reshape(6, 4), (3, 4)),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", OTHERS)
def test_eager_asks_for_the_layout(case: str, loss: str) -> None:
    fn, shape = OTHERS[case]
    compiled = strict(fn)
    for _ in range(2):
        expected = gradients(fn, fn, shape, LOSSES[loss])
        assert_same_gradients(expected, gradients(compiled, fn, shape, LOSSES[loss]))


def test_a_backend_for_certain_strides_gets_a_program_of_its_own() -> None:
    from aheadgrad.backends.eager import compile_eager

    strides: list[Any] = []

    def noting(request: Any) -> Any:
        if request.role == "backward":
            strides.append(request.tangent_strides)
        made = compile_eager(request)
        return lambda args: made.call(args)

    compiled = aheadgrad.compile(lambda x: x.sin(), backend=noting, fallback="error", frontend="trace")
    compiled(leaf(3, 4)).sum().backward()
    assert strides == [((0, 0),)]

"""Programs that were made to break Inductor: values, gradients, layouts and errors are those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.torchlayer.inductor import missing

pytestmark = [
    pytest.mark.skipif(missing("cpu") is not None, reason="needs a C++ compiler"),
]


def fast(fn: Any) -> Any:
    return aheadgrad.compile(fn, frontend="trace", fallback="error", backend="inductor")


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def pools(x: Tensor) -> tuple[Tensor, ...]:
    """Inductor's own gradient is wrong in the last windows, which are smaller."""
    whole = F.avg_pool2d(x, 2, ceil_mode=True), F.avg_pool3d(x, 3, ceil_mode=True, padding=1)
    return *whole, F.avg_pool2d(x, 3, ceil_mode=True, count_include_pad=False, padding=1)


def written(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    part = y.view(4, -1)[:, 1:9]
    part.mul_(2)
    y[0].add_(part.sum())
    y[y > 3] = 7
    return y, part, y.transpose(0, 1)


def edges(x: Tensor) -> tuple[Tensor, ...]:
    flat = x.flatten()
    return (
        flat.amax(),
        x.clamp(min=1.0).cummax(0).values,
        torch.maximum(x, x.flip(0)),
        F.normalize(x * 0, dim=1),
        F.pad(x[0], (1, 2), mode="reflect"),
        x.unfold(3, 3, 2) * x.roll(2, -1)[..., :3, None],
        flat.as_strided((3, 2), (1, 1)),
    )


@pytest.mark.parametrize("fn", [pools, written, edges])
def test_gradients(fn: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 7)
    found = []
    for run in (fn, fast(fn)):
        given = x.clone().requires_grad_()
        out = run(given)
        grads = [torch.autograd.grad(t.square().sum(), given, retain_graph=True)[0] for t in out]
        found.append([*out, *grads])
        assert [t.stride() for t in out] == [t.stride() for t in fn(x)]
    same(found[1], found[0])


def test_integers_wrap_and_bits_are_seen_through_other_types() -> None:
    def fn(i: Tensor, b: Tensor, u: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        bits = x.view(torch.int32)
        bits.bitwise_and_(-(2**31))
        whole = i + 1, i * i, -b, b.abs(), u - 5, u * 3, b << 1, i.cumsum(0), b.prod(), ~u, u // 7
        return *whole, x * 1, x.to(torch.float16).view(torch.int16)

    given = (
        torch.tensor([2**31 - 1, -(2**31), 5], dtype=torch.int32),
        torch.tensor([127, -128, 3], dtype=torch.int8),
        torch.tensor([250, 3], dtype=torch.uint8),
    )
    x, y = torch.randn(5), torch.randn(5)
    y.copy_(x)
    torch.testing.assert_close(fast(fn)(*given, x), fn(*given, y), rtol=0, atol=0)
    assert torch.equal(x, y)


def test_what_is_not_finite() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        ops = F.relu, F.softplus, F.silu, F.mish, F.elu, F.hardswish, F.logsigmoid, torch.sign, torch.log1p
        more = x.amax(), x.argmax(), x.softmax(0), x.clamp(0, 1), x.pow(0), x.sort().values, x.logsumexp(0)
        return (
            x * 0,
            *(op(x) for op in ops),
            *more,
            torch.fmax(x, x * 0),
            torch.atan2(x, x),
            torch.xlogy(x, x),
        )

    inf, nan = float("inf"), float("nan")
    x = torch.tensor([nan, 1.0, inf, -inf, 0.0, -0.0, 1e30] * 3)
    same(fast(fn)(x), fn(x))


def of_all_kinds(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone().uniform_()
    drawn = torch.rand(3), torch.randn_like(x), torch.randint(0, 9, (4,)), torch.randperm(5)
    return y, *drawn, F.dropout(x, 0.5), torch.empty(3).exponential_(), torch.bernoulli(y)


def fused_across(x: Tensor) -> tuple[Tensor, ...]:
    """What needs the second numbers is fused with what is there before the first are drawn."""
    y, first, second = x.sin(), torch.rand(6), torch.rand(6)
    return y, y * second, first


@pytest.mark.parametrize("fn", [of_all_kinds, fused_across])
def test_random_numbers_and_the_state_after_them(fn: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    x = torch.randn(6)
    found = []
    for run in (fn, fast(fn)):
        torch.manual_seed(7)
        found.append([*run(x), torch.rand(1)])
    same(found[1], found[0])


class Counting(nn.Module):
    """Statistics and counters: buffers that change in training, and do not in evaluation."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * self.calls


def test_training_evaluation_and_inference_in_turn() -> None:
    found = []
    for way in (lambda m: m, fast):
        torch.manual_seed(1)
        model = Counting()
        run, seen = way(model), []
        for train in (True, False, True):
            model.train(train)
            x = torch.randn(6, 4, requires_grad=True)
            run(x).sin().sum().backward()  # (of a norm's squares the gradients are rounding alone)
            seen.append(x.grad)
            with torch.no_grad():
                seen.append(run(x))
        found.append([*seen, *model.state_dict().values(), *(p.grad for p in model.parameters())])
    same(found[1], found[0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: F.cross_entropy(x, i, weight=x.detach()[0]),
        lambda x, i: F.cross_entropy(x, i, reduction="none"),
        lambda x, i: F.cross_entropy(x.expand(2, 3, 5).transpose(1, 2), i.expand(2, 3)),
        lambda x, i: F.nll_loss(x[0].log_softmax(0), i[1]),
    ],
)
def test_targets_that_do_not_exist(fn: Any) -> None:
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        fast(fn)(torch.randn(3, 5, requires_grad=True), torch.tensor([0, 7, 1]))


def test_layouts_of_what_is_taken_apart() -> None:
    """Inductor's decompositions lay some results out otherwise than the ops do."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([x, x], 1), torch.stack([x, x], 1), torch.cat([x, x[:0]]) * 2, x.roll(1, 2)

    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for eager, ours in zip(fn(x), fast(fn)(x), strict=True):
        assert torch.equal(eager, ours)
        assert eager.stride() == ours.stride()

"""Kinds of code that an export follows: custom functions, checkpoints, control flow, transforms, hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aheadgrad
from aheadgrad.errors import CaptureError, UnsupportedInput
from tests.export_cases import export


class Triple(torch.autograd.Function):
    """Whose derivative is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x


def custom(model: nn.Module, x: Tensor) -> Tensor:
    return Triple.apply(model(x)).sum()


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(model, x, use_reentrant=False)
    return out.square().sum()


def branches(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (model(x),))
    return out.sum()


def hooked(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    out.register_hook(lambda g: g * 10)
    return out.sum()


def transformed(model: nn.Module, x: Tensor) -> Tensor:
    rows = torch.vmap(lambda row: torch.func.grad(lambda r: r.sin().sum())(row))(x)
    return (model(rows) * rows).sum()


def picked(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out[out > 0].square().sum()


def turned(model: nn.Module, x: Tensor) -> Tensor:
    return torch.fft.fft(model(x)).abs().sum()


def reached(model: nn.Module, x: Tensor) -> Tensor:
    """The parameters as arguments of something else, and as results."""
    weight = dict(model.named_parameters())["0.weight"]
    return (model(x) @ weight).square().sum()


CASES: list[Callable[[nn.Module, Tensor], Tensor]] = [
    custom,
    checkpointed,
    branches,
    hooked,
    transformed,
    picked,
    turned,
    reached,
]


@pytest.mark.parametrize("partition", [None, "min_cut"])
@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_losses_and_gradients(fn: Any, partition: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def run(x: Tensor) -> Tensor:
        out: Tensor = fn(model, x)
        return out

    exported = export(run, (torch.randn(4, 3),), loss=0, partition=partition)
    for _ in range(2):
        x = torch.randn(4, 3)
        step, loss = exported.run(x), run(x)
        names, tensors = zip(*model.named_parameters(), strict=True)
        torch.testing.assert_close(step.output, loss.detach(), rtol=0, atol=0)
        wanted = torch.autograd.grad(loss, tensors)
        torch.testing.assert_close([step.gradients[f"model.{n}"] for n in names], list(wanted))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "lstm": (lambda: nn.LSTM(3, 4), lambda: torch.randn(5, 2, 3)),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: torch.randn(2, 3),
    ),
    "spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), lambda: torch.randn(2, 3)),
    "multihead": (
        lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True, dropout=0.0),
        lambda: torch.randn(2, 3, 4),
    ),
    "compiled": (lambda: aheadgrad.compile(nn.Linear(3, 3)), lambda: torch.randn(2, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    torch.manual_seed(0)
    make, example = MODULES[name]
    model = make()
    exported = export(model, (example(),))
    for _ in range(2):
        x = example()
        torch.testing.assert_close(exported.run(x), _detached(model(x)))
    assert all(type(t) is nn.Parameter for t in model.parameters())


def _detached(out: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.detach(), out)


def test_gradients_that_are_sparse() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    exported = aheadgrad.export(lambda words: table(words).sum(), (torch.tensor([1, 2]),), loss=0)
    exported.backward(torch.tensor([3, 3]))
    found = exported.state["table.weight"].grad
    assert found is not None
    assert found.layout is torch.sparse_coo
    table(torch.tensor([3, 3])).sum().backward()
    torch.testing.assert_close(found.to_dense(), table.weight.grad.to_dense())


def test_a_jagged_tensor() -> None:
    rows = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    model = nn.Linear(3, 3)
    found = aheadgrad.export(model, (rows,)).run(rows)
    torch.testing.assert_close(found.values(), model(rows).values().detach())


def test_results_that_are_held_tensors() -> None:
    model = nn.Linear(2, 2)
    exported = export(lambda x: (model.weight, model.weight.t(), x), (torch.ones(2),))
    weight, turned, _ = exported.run(torch.ones(2))
    assert weight is exported.state["model.weight"]
    assert turned.data_ptr() == weight.data_ptr()


def test_a_step_with_a_closure_and_an_average() -> None:
    def make() -> tuple[nn.Module, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
            return loss.detach()

        return average, step

    (average, eager), (_, ours) = make(), make()
    x = torch.randn(4, 3)
    exported = export(ours, (x,))
    for _ in range(4):
        torch.testing.assert_close(exported.run(x), eager(x), rtol=0, atol=0)
    torch.testing.assert_close(exported.state["average.weight"].detach(), average.weight.detach())


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.ones(1))
        self.register_buffer("b", torch.zeros(1))
        self.mean = torch.zeros(1)
        self.last: Any = None


class _Counts(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b + 1
        return x * self.b


class _Swaps(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return x * self.b


class _Averages(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach()
        return self.mean + x


class _Remembers(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        out = x if self.last is None else x + self.last
        self.last = x * 2
        return out


class _Grows(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.b = torch.cat([self.b, x])
        return self.b.sum()


@pytest.mark.parametrize("make", [_Counts, _Swaps, _Averages])
def test_a_tensor_in_the_place_of_another_is_an_update(make: type[_Keeps]) -> None:
    x = torch.ones(1)
    exported, model = aheadgrad.export(make(), (x,)), make()
    for _ in range(3):
        assert torch.equal(exported.run(x), model(x))
    assert torch.equal(exported.state["b"], model.b)


@pytest.mark.parametrize("make", [_Remembers, _Grows])
def test_what_the_next_call_would_find_otherwise_is_refused(make: type[_Keeps]) -> None:
    model = make()
    with pytest.raises(CaptureError, match=r"The function (leaves a tensor in last|uses b)"):
        aheadgrad.export(model, (torch.ones(1),))
    assert model.last is None
    assert model.b.shape == (1,)


class _Counter:
    def __init__(self) -> None:
        self.calls = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_counter_of_a_methods_object_is_refused() -> None:
    counter = _Counter()
    with pytest.raises(CaptureError, match=r"changes self\.calls"):
        aheadgrad.export(counter.scaled, (torch.ones(1),))
    assert counter.calls == 0


def test_arguments_that_an_export_cannot_hold() -> None:
    def grows(parts: list[Tensor]) -> list[Tensor]:
        parts.append(parts[0] + 1)
        return parts

    given = [torch.ones(1)]
    with pytest.raises(CaptureError, match="among its arguments"):
        aheadgrad.export(grows, (given,))
    assert len(given) == 1
    with pytest.raises(UnsupportedInput, match="counter is a _Counter"):
        aheadgrad.export(lambda x, counter: x * counter.calls, (torch.ones(1), _Counter()))
    exported = aheadgrad.export(lambda x, zero: torch.copysign(x, torch.tensor(zero)), (torch.ones(1), 0.0))
    with pytest.raises(UnsupportedInput, match="zero is"):
        exported.run(torch.ones(1), -0.0)

"""What a function keeps between its calls: found wherever it is and updated, or refused. Never forgotten."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import CaptureError, InvalidOption
from tests.export_cases import export

Step = Callable[[Tensor], Any]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().mean()
    return loss


def trains(net: nn.Module, optimizer: torch.optim.Optimizer, then: Callable[[], Any]) -> Step:
    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        return loss.item(), then()

    return step


def numbers() -> Step:
    net = model()
    return trains(net, torch.optim.Adam(net.parameters(), lr=0.1), lambda: None)


def rates_that_are_replaced() -> Step:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5))

    def halve() -> None:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5

    return trains(net, optimizer, halve)


def an_optimizer_made_inside() -> Step:
    net = model()

    def step(x: Tensor) -> Any:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        return trains(net, optimizer, lambda: None)(x)

    return step


def an_optimizer_for_each_parameter() -> Step:
    net = model()
    optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in net.parameters()}

    def step_now(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step_now)

    def step(x: Tensor) -> float:
        loss = loss_of(net, x)
        loss.backward()
        return loss.item()

    return step


def averages_by_parameter() -> Step:
    net = model()
    averages = {p: p.detach().clone() for p in net.parameters()}

    def average() -> list[Tensor]:
        for p in net.parameters():
            averages[p] = averages[p] * 0.9 + p.detach() * 0.1
        return [averages[p] + 0 for p in net.parameters()]

    return trains(net, torch.optim.SGD(net.parameters(), lr=0.1), average)


def two_networks() -> Step:
    one, other = model(), nn.Linear(2, 1)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> tuple[float, float]:
        loss = other(one(x)).mean()
        loss.backward()
        first.step()
        first.zero_grad()
        against = other(one(x).detach()).square().mean()
        against.backward()  # on top of what the other loss left
        second.step()
        return loss.item(), against.item()

    return step


def in_a_class() -> Step:
    class Holds:
        total = torch.zeros(())

    def step(x: Tensor) -> Tensor:
        Holds.total += x.sum()
        return Holds.total * 1

    return step


def in_defaults() -> Step:
    totals = [torch.zeros(())]

    def step(x: Tensor, total: list[Tensor] = totals) -> Tensor:
        total[0] = total[0] + x.sum()
        return total[0] * 1

    return step


class Trains(nn.Module):
    """With all that it needs on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.seen = [torch.zeros(())]

    def forward(self, x: Tensor) -> Any:
        self.seen[0] = self.seen[0] + x.sum()
        return trains(self.net, self.optimizer, lambda: self.seen[0] * 1)(x)


FOLLOWED = [
    Trains,
    numbers,
    rates_that_are_replaced,
    an_optimizer_made_inside,
    an_optimizer_for_each_parameter,
    averages_by_parameter,
    two_networks,
    in_a_class,
    in_defaults,
]


@pytest.mark.parametrize("make", FOLLOWED, ids=lambda make: make.__name__)
def test_state_that_is_followed(make: Callable[[], Step], tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = make()
    torch.manual_seed(0)
    exported = aheadgrad.export(make(), (torch.ones(5, 3),))
    for k in range(4):
        if k == 2:
            exported.save(tmp_path / "x.ag")
            exported = aheadgrad.load(tmp_path / "x.ag")
        x = torch.randn(5, 3)
        torch.testing.assert_close(exported.run(x), theirs(x), rtol=0, atol=0)


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def counts_in_a_slot() -> Step:
    held = Slotted()

    def step(x: Tensor) -> Tensor:
        held.n += 1
        return x * held.n

    return step


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.held.n += 1
        return x * self.held.n


def counts_in_a_class() -> Step:
    class Holds:
        n = 0

    def step(x: Tensor) -> Tensor:
        Holds.n += 1
        return x * Holds.n

    return step


def counts_on_itself() -> Step:
    def step(x: Tensor) -> Tensor:
        step.n += 1  # type: ignore[attr-defined]
        return x * step.n  # type: ignore[attr-defined]

    step.n = 0  # type: ignore[attr-defined]
    return step


def makes_an_attribute() -> Step:
    held = type("Held", (), {"n": 1})()

    def step(x: Tensor) -> Tensor:
        held.n = held.n + 1
        return x * held.n

    return step


def draws() -> Step:
    return lambda x: x * random.random()


def takes_its_own_batches() -> Step:
    batches = iter([torch.ones(3), torch.zeros(3)])
    return lambda x: x * next(batches)


def has_two_names() -> Step:
    held = {"a": torch.zeros(3)}
    held["b"] = held["a"]

    def step(x: Tensor) -> Tensor:
        held["a"] = held["a"] + 1
        return x * held["a"] + held["b"]

    return step


def leaves_eval_mode() -> Step:
    net = nn.BatchNorm1d(3)

    def step(x: Tensor) -> Tensor:
        out: Tensor = net(x)
        net.eval()
        return out

    return step


def hides_it_deep() -> Step:
    net = model()
    held: Any = [[[[[[[[net]]]]]]]]

    def step(x: Tensor) -> Tensor:
        loss = loss_of(held[0][0][0][0][0][0][0][0], x)
        loss.backward()
        return loss.detach()

    return step


REFUSED = {
    counts_in_a_slot: "changes held.n",
    Counts: "changes held.n",
    counts_in_a_class: r"changes .*Holds\.n",
    counts_on_itself: r"changes .*step\.n",
    makes_an_attribute: r"changes held\.n",
    draws: "random numbers of Python",
    takes_its_own_batches: "takes the next part of batches",
    has_two_names: "something else than held",
    leaves_eval_mode: r"changes net\.training",
    hides_it_deep: r"leaves a gradient in a tensor of size \(4, 3\)",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_state_that_is_refused(make: Callable[[], Step]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[make]) as raised:
        export(make(), (torch.ones(5, 3),))
    assert "frontend" not in str(raised.value)


def test_a_flag_that_is_set_once() -> None:
    """Where it makes no difference to what is computed, the first call is as any other."""

    class Once(nn.Module):
        ready = False

        def forward(self, x: Tensor) -> Tensor:
            self.ready = True
            return x * 2

    class Sized:
        @functools.cached_property
        def two(self) -> float:
            return 2.0

    held = Sized()
    exported = export(lambda x: x * held.two, (torch.ones(2),))
    torch.testing.assert_close(exported.run(torch.ones(2)), torch.full((2,), 2.0))
    assert not vars(held)
    module = Once()
    torch.testing.assert_close(export(module, (torch.ones(2),)).run(torch.ones(2)), torch.full((2,), 2.0))
    assert not module.ready


def test_numbers_that_leave() -> None:
    def fn(x: Tensor) -> Any:
        return x.sum().item(), {"count": x[x > 0].shape[0]}, x.argmax().item(), x.sum().item() > 0

    exported = export(fn, (torch.ones(3),))
    assert exported.signature.numbers == (0, 1, 2, 3)
    for x in (torch.tensor([1.0, -2.0, 3.5]), torch.tensor([-1.0, -1.0, 0.0])):
        found = exported.run(x)
        assert found == fn(x)
        assert [type(v) for v in found] == [float, dict, int, bool]
    with pytest.raises(CaptureError, match="a truth value that it reads"):
        export(lambda x: x * x.any().item(), (torch.ones(3),))
    with pytest.raises(CaptureError, match=r"Return tuple\(size\)"):
        export(lambda x: x[x > 0].shape, (torch.ones(3),))


def test_derivatives_around_a_run_are_refused() -> None:
    exported = export(lambda x: x.sin(), (torch.ones(3),))
    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.func.vmap(exported.run)(x), x.sin())
    with pytest.raises(InvalidOption, match=r"inside of torch\.func\.grad"):
        torch.func.grad(lambda x: exported.run(x).sum())(torch.ones(3))
    assert not exported.run(torch.ones(3, requires_grad=True)).requires_grad


def test_arguments_without_grad_get_none() -> None:
    exported = export(lambda x: x.square().sum(), (torch.ones(3, requires_grad=True),), loss=0)
    x = torch.ones(3)
    exported.backward(x)
    assert x.grad is None


def test_what_was_there_before_is_not_written_to() -> None:
    """A tensor in another's place: results of former calls, and what a backward saved, stay as they are."""

    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 2)
            self.register_buffer("rate", torch.ones(2))

        def forward(self, x: Tensor) -> Any:
            before = self.rate
            loss = (self.layer(x) * self.rate).square().sum()
            self.rate = self.rate * 0.5
            return loss, before

    theirs, x = Decays(), torch.ones(4, 3)
    for partition in (None, "min_cut"):
        exported, theirs = export(Decays(), (x,), loss=0, partition=partition), Decays()
        found, wanted = [], []
        for _ in range(3):
            wanted.append(theirs(x))
            wanted[-1][0].backward()
            found.append(exported.backward(x))
            torch.testing.assert_close([b for _, b in found], [b for _, b in wanted], rtol=0, atol=0)
        weight = theirs.layer.weight.grad
        torch.testing.assert_close(exported.parameters["layer.weight"].grad, weight, rtol=0, atol=0)
        assert "update     rate: another tensor" in str(exported)
        assert exported.signature.updated == ("rate",)


def test_two_places_for_one_tensor_are_refused() -> None:
    held = {"before": torch.zeros(3), "now": torch.ones(3)}

    def step(x: Tensor) -> Tensor:
        held["before"] = held["now"]
        held["now"].add_(1)
        return held["before"] * x

    with pytest.raises(CaptureError, match=r"leaves held\['before'\] in the memory of another tensor"):
        export(step, (torch.ones(3),))

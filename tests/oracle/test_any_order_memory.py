"""What higher derivatives keep alive: nothing longer than eager does, and no cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aheadgrad.testing.peak import peak_of

from .common import strict
from .plays import Packs, double, grad


def body(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).sin().sum()


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() * x


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def second_order(run: Any, refs: list[Any] | None = None) -> Any:
    x, w = pair()
    out = run(x, w)
    (g,) = grad(out, x)
    second = grad(g, [x, w], create_graph=False)
    if refs is not None:
        refs += [weakref.ref(t) for t in (x, w, out, g, *second)]
    return None


def live_tensors() -> int:
    return sum(1 for o in gc.get_objects() if issubclass(type(o), Tensor))


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_left_after_second_order() -> None:
    compiled = strict(body)
    for _ in range(2):
        second_order(compiled)
    gc.collect()
    before = live_tensors()
    refs: list[Any] = []
    for _ in range(3):
        second_order(compiled, refs)
    assert [r() for r in refs] == [None] * len(refs)
    assert live_tensors() == before
    assert gc.collect() == 0


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_left_of_graphs_that_nobody_used() -> None:
    compiled = strict(body)
    second_order(compiled)
    gc.collect()
    before = live_tensors()
    for _ in range(3):
        x, w = pair()
        (g,) = grad(compiled(x, w), x)
        refs = [weakref.ref(t) for t in (x, w, g)]
        del x, w, g
        assert [r() for r in refs] == [None] * 3
    assert live_tensors() == before


@pytest.mark.usefixtures("no_collector")
def test_what_is_saved_lives_no_longer_than_in_eager() -> None:
    """Whether anything that the call saved is still alive, at each station of a second derivative."""

    def stations(run: Any) -> list[bool]:
        packs = Packs()
        x, w = pair()
        with packs.on():
            out = run(x, w)
        found = [packs.alive > 0]
        (g,) = grad(out, x)
        found.append(packs.alive > 0)
        del out
        found.append(packs.alive > 0)
        second = grad(g, [x, w], create_graph=False)
        found.append(packs.alive > 0)
        del g, second
        found.append(packs.alive > 0)
        return found

    compiled = strict(body)
    expected = stations(body)
    assert expected == [True, True, True, False, False]
    for _ in range(3):
        found = stations(compiled)
        assert all(eager or not ours for eager, ours in zip(expected, found, strict=True)), found
        assert found[0]


@pytest.mark.usefixtures("no_collector")
def test_the_first_order_path_keeps_nothing_more() -> None:
    """A backward without create_graph frees everything, also after higher orders were compiled."""
    compiled = strict(body)
    counts = []
    for use_second in (False, True, False):
        if use_second:
            second_order(compiled)
        packs = Packs()
        x, w = pair()
        with packs.on():
            out = compiled(x, w)
        counts.append(packs.packed)
        assert packs.alive > 0
        out.backward()
        assert packs.alive == 0
        ref = weakref.ref(out)
        del out
        assert ref() is None
    assert counts[0] == counts[2]


@pytest.mark.usefixtures("no_collector")
def test_a_gradient_keeps_the_result_alive_no_longer_than_eager() -> None:
    def play(run: Any) -> list[bool]:
        x, w = pair()
        out = run(x, w)
        ref = weakref.ref(out)
        (g,) = grad(out, x)
        del out
        found = [ref() is None]
        del g
        return [*found, ref() is None]

    compiled = strict(layer)
    for _ in range(2):
        assert play(compiled) == play(layer)


def test_third_derivatives_need_no_more_memory_than_eager() -> None:
    """As in physics-informed training: each backward lets go of what was saved as it goes along."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x, t = (torch.rand(256, requires_grad=True) for _ in range(2))

    def network(x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = model(torch.stack([x, t], dim=-1))
        return out.squeeze(-1)

    def step(run: Any) -> None:
        u = run(x, t)
        by_x, by_t = grad(u, (x, t))
        (second,) = grad(by_x, x)
        (third,) = grad(second, x)
        model.zero_grad()
        (by_t + u * by_x - 0.05 * third).pow(2).mean().backward(inputs=list(model.parameters()))

    compiled = strict(network)
    peaks = []
    for run in (network, compiled):
        for _ in range(3):
            step(run)
        peaks.append(peak_of(lambda run=run: step(run)))  # type: ignore[misc]
    eager, ours = peaks
    assert ours <= 1.05 * eager


def test_cheap_values_are_not_saved_for_the_next_order_either() -> None:
    """As in force training: with min-cut, elementwise ops of each order are done again."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.SiLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    x = torch.rand(256, 32, requires_grad=True)

    def step(run: Any) -> list[Tensor]:
        energy = run(x)
        (force,) = grad(energy.sum(), x)
        loss = (energy**2).mean() + (force**2).mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    ways = (model, strict(model), strict(model, partition="min_cut"))
    for run in ways[1:]:
        for eager, ours in zip(step(model), step(run), strict=True):
            assert torch.equal(eager, ours)
    eager, usual, less = (peak_of(lambda run=run: step(run)) for run in ways)  # type: ignore[misc]
    assert usual <= eager
    assert less <= 0.7 * eager


def test_gradients_of_weights_are_added_up_one_by_one() -> None:
    """With min-cut: sums that waited for the end, as results are turned round, kept all parts alive."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    x = torch.rand(4, 64, requires_grad=True)

    def step(run: Any) -> None:
        energy = run(x)
        (force,) = grad(energy.sum(), x)
        model.zero_grad()
        (energy.sum() + (force**2).sum()).backward(inputs=list(model.parameters()))

    compiled = strict(model, partition="min_cut")
    eager, ours = (_peak(step, run) for run in (model, compiled))
    assert ours <= 1.05 * eager


def _peak(step: Any, run: Any) -> int:
    for _ in range(3):
        step(run)
    return peak_of(lambda: step(run))

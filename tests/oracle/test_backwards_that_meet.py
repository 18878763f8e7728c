"""A loss on a result and on its gradients: the backward of the gradients hands over to that of the result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aheadgrad.backends.contract import Executable, Request
from aheadgrad.backends.eager import compile_eager
from aheadgrad.program.program import Program

from .common import strict
from .plays import double
from .test_wanted_gradients import Counting


def energy(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(x @ w) @ v).sin().sum(-1)


def given() -> list[Tensor]:
    return [double(3, 4, seed=1), double(4, 4, seed=2), double(4, 4, seed=3)]


def both(fn: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    found = fn(x, w, v)
    (force,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return (found**2).sum() + (force**2).sum()


def gradients_alone(fn: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    (force,) = torch.autograd.grad(fn(x, w, v).sum(), x, create_graph=True)
    return (force**2).sum()


def tangents_from_results(fn: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    found = fn(x, w, v)
    grads = torch.autograd.grad((found**3).sum(), (w, v), create_graph=True)
    return sum(((g * g).sum() for g in grads), found.sum())


def two_gradients(fn: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    found = fn(x, w, v)
    (force,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    (other,) = torch.autograd.grad(found[0], w, create_graph=True)
    return found.sum() + (force * force).sum() + other.exp().sum()


def three_orders(fn: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    found = fn(x, w, v)
    (first,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x, create_graph=True)
    return found.sum() + (first * second * third).sum()


def third_without_second(fn: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Nobody holds the second derivative when the backward runs."""
    found = fn(x, w, v)
    (first,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    high = first
    for _ in range(2):
        (high,) = torch.autograd.grad(high.sum(), x, create_graph=True)
    return found.sum() + (first * high).sum()


LOSSES = (both, gradients_alone, tangents_from_results, two_gradients, three_orders, third_without_second)


def close(found: Any, expected: Any) -> None:
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_all_gradients(loss: Callable[..., Tensor]) -> None:
    compiled = strict(energy)
    for _ in range(3):
        results = []
        for fn in (energy, compiled):
            tensors = given()
            loss(fn, *tensors).backward()
            results.append([t.grad for t in tensors])
        close(*results)


@pytest.mark.parametrize("loss", LOSSES)
def test_some_gradients_again_and_again(loss: Callable[..., Tensor]) -> None:
    compiled, tensors = strict(energy), given()
    results = []
    for fn in (energy, compiled):
        total = loss(fn, *tensors)
        found: list[Any] = []
        for asked in ([0], [1, 2], [2], [0, 1, 2], [1]):
            found += torch.autograd.grad(total, [tensors[i] for i in asked], retain_graph=True)
        found += torch.autograd.grad(total, tensors[0])
        results.append(found)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(total, tensors[1])
    close(*results)


@pytest.mark.parametrize("loss", LOSSES)
def test_inputs_with_a_history(loss: Callable[..., Tensor]) -> None:
    compiled, results = strict(energy), []
    for fn in (energy, compiled):
        tensors = given()
        loss(fn, *(t * 2 for t in tensors)).backward()
        results.append([t.grad for t in tensors])
    close(*results)


def layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.linear(x, w).tanh(), v).sin().sum(-1)


@pytest.mark.parametrize("fn", [layers, energy])
@pytest.mark.parametrize(
    ("loss", "programs"),
    [(both, (1, 1)), (gradients_alone, (1, 1)), (three_orders, (1, 1)), (two_gradients, (2, 3))],
)
def test_a_backward_of_gradients_is_one_program(
    loss: Callable[..., Tensor], programs: tuple[int, int], fn: Callable[..., Tensor]
) -> None:
    """Unless there are several that lead to the same one (which run first where gradients of theirs would
    otherwise be added up in another order)."""
    ran: list[Program] = []

    def noting(request: Request) -> Executable:
        made = compile_eager(request)

        def run(args: list[Any]) -> list[Any]:
            ran.append(request.program)
            return made.call(args)

        return Executable(run)

    compiled = strict(fn, backend=noting)
    for _ in range(2):
        tensors, expected = given(), given()
        total = loss(compiled, *tensors)
        ran.clear()
        total.backward()
        assert len(ran) == programs[fn is energy]
        loss(fn, *expected).backward()
        close([t.grad for t in tensors], [t.grad for t in expected])


def test_what_a_hook_does_to_a_saved_tensor_while_it_waits() -> None:
    compiled = strict(energy)
    x, w, v = given()
    found = compiled(x, w, v)
    (force,) = torch.autograd.grad(found.sum(), x, create_graph=True)

    def spoil(_: Tensor) -> None:
        with torch.no_grad():
            w.mul_(2)

    middle = (
        found * 1
    )  # its hook runs when the backward of the force has begun, and that of the energy has not
    total = (middle**2).sum() + (force**2).sum()
    middle.register_hook(spoil)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_gradients_taken_in_another_thread() -> None:
    """As on a GPU, where the engine has threads of its own: they number nodes by themselves."""
    compiled, counts, results = strict(energy), [], []
    for elsewhere in (False, True):
        for _ in range(2):
            tensors = given()
            for _ in range(50):
                found = compiled(*tensors)
            take = _in_a_thread if elsewhere else _at_once
            (force,) = take(lambda: torch.autograd.grad(found.sum(), tensors[0], create_graph=True))
            (second,) = take(lambda: torch.autograd.grad(force.sum(), tensors[0], create_graph=True))
            with Counting() as counting:
                (found.sum() + (force * second).sum()).backward()
        counts.append(counting.ops.count("aten.mm.default"))
        results.append([t.grad for t in tensors])
    assert counts[0] == counts[1] > 0
    close(*results)


def _at_once(work: Callable[[], Any]) -> Any:
    return work()


def _in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("loss", [both, tangents_from_results, third_without_second])
def test_no_more_matrix_products_than_in_eager(loss: Callable[..., Tensor]) -> None:
    counts = []
    for fn in (energy, strict(energy)):
        with Counting() as counting:
            for _ in range(3):
                counting.ops.clear()
                loss(fn, *given()).backward()
        counts.append(counting.ops.count("aten.mm.default"))
    assert counts[1] <= counts[0]


def test_a_backward_that_fails_on_the_way_leaves_nothing_behind() -> None:
    compiled, results = strict(energy), []
    for fn in (energy, compiled):
        tensors = given()
        found = fn(*tensors)

        def refuse(grad: Tensor) -> None:
            raise ValueError("not today")

        handle = found.register_hook(refuse)
        (force,) = torch.autograd.grad(fn(*tensors).sum(), tensors[0], create_graph=True)
        total = found.sum() + (force * force).sum()
        with pytest.raises(ValueError, match="not today"):
            total.backward(retain_graph=True)
        handle.remove()
        for t in tensors:
            t.grad = None
        total.backward()
        results.append([t.grad for t in tensors])
    close(*results)


def test_forces_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 1)).double()
    compiled, results = strict(model), []
    x = double(5, 3)
    for fn in (model, compiled):
        model.zero_grad()
        found = fn(x)
        (force,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        (found.pow(2).mean() + force.pow(2).mean()).backward(inputs=list(model.parameters()))
        results.append([p.grad for p in model.parameters()])
    close(*results)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w, b)


def gradients_of_a_layer(fn: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The bias' gradient is a sum of the tangent, for which nothing is saved."""
    tensors = [double(4, 3, seed=1), double(5, 3, seed=2), double(5, seed=3)]
    tangent = double(4, 5, seed=4)
    found = torch.autograd.grad(fn(*tensors), tensors, tangent.tanh(), create_graph=True)
    return list(found), [*tensors, tangent]


@pytest.mark.parametrize("order", [(2, 1), (1, 2), (2, 0, 2, 2)])
def test_what_holds_nothing_can_be_differentiated_by_itself(order: tuple[int, ...]) -> None:
    results = []
    for fn in (layer, strict(layer)):
        found, leaves = gradients_of_a_layer(fn)
        got: list[Any] = []
        for k in order:
            if k == 2:  # tanh, behind the tangent, holds something
                got += torch.autograd.grad(found[k].square().sum(), leaves[3], retain_graph=True)
            else:
                got += torch.autograd.grad(found[k].square().sum(), leaves[:2], allow_unused=True)
        results.append([g for g in got if g is not None])
    close(*results)


def test_gradients_add_up_in_the_order_of_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    compiled, results = strict(model), []
    x, y, weights = torch.randn(16, 8), torch.randn(16, 4), list(model.parameters())
    vector = [torch.randn_like(w) for w in weights]
    for fn in (model, compiled):
        gradients = torch.autograd.grad((fn(x) - y).square().mean(), weights, create_graph=True)
        results.append(torch.autograd.grad(gradients, weights, vector))
    assert all(map(torch.equal, *results))


def test_an_edge_may_name_a_leaf() -> None:
    results = []
    for fn in (energy, strict(energy)):
        x, w, v = given()
        edge = torch.autograd.graph.get_gradient_edge(w)
        results.append(torch.autograd.grad(fn(x, w, v).sum(), (x, edge)))
    close(*results)

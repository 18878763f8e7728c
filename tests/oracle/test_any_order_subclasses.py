"""Derivatives of any order through calls with tensor subclasses: as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad
from aheadgrad.testing import Inputs
from tests.oracle.common import default, leaf, same, same_by_default, strict
from tests.oracle.test_subclasses import inputs, nested, non_leaves, pair, pair_and_plain

ORDERS = [2, 3]


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin() * x


def layer(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.layer_norm(torch.tanh(x @ w), (3,)).exp()


def branches(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * w
    return h.sin(), (h @ h).cos()


def apart(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin().exp(), w.cos() * w


def changes(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(w)
    return x.sin() * w


def views(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = (x * w).t()
    return h[0], h.flatten()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fn", [product, layer, branches, apart, views])
@pytest.mark.parametrize("make", [pair_and_plain, non_leaves])
def test_a_subclass_and_a_plain_tensor(fn: Any, make: Callable[[], Inputs], order: int) -> None:
    same(fn, make, order=order, rtol=1e-4, atol=1e-3)


def test_an_input_that_the_call_changes() -> None:
    same(changes, non_leaves, order=2, rtol=1e-4, atol=1e-4)


def test_subclasses_in_subclasses() -> None:
    same(product, lambda: inputs(nested(3, 3), pair(3, 3, seed=4)), order=2, rtol=1e-4, atol=1e-4)


def test_the_default_front_end() -> None:
    same_by_default(product, pair_and_plain, order=2, rtol=1e-4, atol=1e-4)


def test_made_and_dissolved_inside() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        both: Any = TwoTensor(x, x.clone())
        return (both * w).sin().sum()

    same(fn, lambda: inputs(leaf(3, grad=False), leaf(3, seed=3)), order=2, rtol=1e-4, atol=1e-4)


def test_some_of_the_gradients() -> None:
    same(layer, pair_and_plain, order=2, subsets=6, rtol=1e-4, atol=1e-4)


def second(fn: Any, x: Tensor, w: Tensor, tangent: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(fn(x, w), (x, w), tangent, create_graph=True)
    assert all(g.requires_grad for g in grads)
    (grads[0] * 2).sum().backward(retain_graph=True)
    return [*grads, *torch.autograd.grad([(g * g).sum() for g in grads], (x, w, tangent))]


def alike(eager: list[Any], compiled: list[Any]) -> None:
    for a, b in zip(eager, compiled, strict=True):
        assert type(a) is type(b)
        for p, q in zip(
            (a.a, a.b) if type(a) is TwoTensor else (a,),
            (b.a, b.b) if type(b) is TwoTensor else (b,),
            strict=True,
        ):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


KINDS = {
    "a subclass for a plain output": lambda: (leaf(3), leaf(3, seed=1), pair(3, seed=2)),
    "a plain tensor for a subclass": lambda: (pair(3), leaf(3, seed=1), leaf(3, seed=2)),
    "a subclass for a subclass": lambda: (pair(3), pair(3, seed=1), pair(3, seed=2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["numbers", "symbols"])
def test_tangents_of_another_kind(kind: str, options: Any) -> None:
    alike(second(product, *KINDS[kind]()), second(strict(product, **options), *KINDS[kind]()))


@pytest.mark.parametrize("first", [leaf, pair])
@pytest.mark.parametrize("last", [leaf, pair])
def test_tangents_of_several_kinds(first: Any, last: Any) -> None:
    """A plain result is not written over with a subclass, which would do so once for each of its parts."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x * y) + x.sin(), (x * x * y).cos()

    def run(fn: Any) -> list[Tensor]:
        x, y = leaf(3), leaf(3, seed=1)
        grads = torch.autograd.grad(fn(x, y), (x, y), (first(3, seed=2), last(3, seed=3)), create_graph=True)
        return [*grads, *torch.autograd.grad(grads, (x, y), [torch.ones_like(g) for g in grads])]

    alike(run(fn), run(strict(fn)))


@pytest.mark.parametrize("compiled", [strict, default], ids=["trace", "dynamo"])
def test_other_sizes(compiled: Any) -> None:
    fn = compiled(product, dynamic=True)
    for n in (3, 5):
        eager, made = ((pair(n), leaf(n, seed=1), pair(n, seed=2)) for _ in range(2))
        alike(second(product, *eager), second(fn, *made))


def test_jagged_tensors() -> None:
    def make() -> tuple[Tensor, Tensor]:
        parts = [leaf(2, 4, seed=1, grad=False), leaf(3, 4, seed=2, grad=False)]
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True), leaf(4, seed=3)

    def run(fn: Any) -> list[Tensor]:
        x, w = make()
        (force,) = torch.autograd.grad(fn(x, w).values().sum(), x, create_graph=True)
        grads = torch.autograd.grad((force.values() ** 2).sum(), (x, w))
        return [force.values(), grads[0].values(), grads[1]]

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin() * x

    alike(run(fn), run(strict(fn)))


def test_through_the_drop_in() -> None:
    from aheadgrad.compat import aot_function

    def nop(graph: Any, _: Any) -> Any:
        return graph

    compiled = aot_function(product, fw_compiler=nop, bw_compiler=nop)
    alike(
        second(product, *KINDS["a subclass for a subclass"]()),
        second(compiled, *KINDS["a subclass for a subclass"]()),
    )


def test_other_backends_get_plain_tensors_only() -> None:
    seen: list[Any] = []

    def backend(program: Any) -> Any:
        seen.append(program)
        from aheadgrad.backends.eager import compile_eager

        return compile_eager(program)

    compiled = aheadgrad.compile(product, frontend="trace", backend=backend, fallback="error")
    alike(
        second(product, *KINDS["a subclass for a subclass"]()),
        second(compiled, *KINDS["a subclass for a subclass"]()),
    )
    assert len(seen) >= 3

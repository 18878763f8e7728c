"""Custom ops, ordered effects and control-flow operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows

import aheadgrad
from aheadgrad.testing import Inputs
from tests.oracle.common import leaf, leaves, one, same, strict

LOG: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[Any]:
    """A small library of ops, gone again afterwards."""
    with torch.library._scoped_library("aheadgrad_tests", "DEF") as library:
        library.define("scale(Tensor(a!) x, float by) -> ()")
        library.define("split_off(Tensor x, Tensor(a!) rest) -> Tensor")
        library.define("both(Tensor(a!)[] xs) -> ()")
        library.define("sine(Tensor x) -> Tensor")
        library.define("note(Tensor x, str what) -> ()")
        library.define("noted(Tensor x, str what) -> Tensor")
        key = "CompositeExplicitAutograd"
        library.impl("scale", _scale, key)
        library.impl("split_off", _split_off, key)
        library.impl("both", _both, key)
        library.impl("sine", lambda x: x.sin(), key)
        library.impl("note", lambda x, what: LOG.append(what), key)
        library.impl("noted", _noted, key)
        torch.library.register_fake("aheadgrad_tests::note", lambda x, what: None, lib=library)
        yield torch.ops.aheadgrad_tests


def _scale(x: Tensor, by: float) -> None:
    with torch.no_grad():
        x.detach().mul_(by)


def _split_off(x: Tensor, rest: Tensor) -> Tensor:
    rest.detach().copy_(x - x.floor())
    return x.floor()


def _both(xs: list[Tensor]) -> None:
    for x in xs:
        x.detach().add_(1)


def _noted(x: Tensor, what: str) -> Tensor:
    if not isinstance(x, torch._subclasses.FakeTensor):
        LOG.append(what)
    return x.clone()


def test_functional(ops: Any) -> None:
    same(lambda x: ops.sine(x.detach()) * x, one(3))


def test_changes_an_intermediate(ops: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        ops.scale(y, 3.0)
        return y + 1

    same(f, one(3, 3, grad=False))


def test_changes_an_input(ops: Any) -> None:
    def f(x: Tensor) -> Tensor:
        ops.scale(x, 3.0)
        return x + 1

    same(f, one(3, 3, grad=False))


def test_changes_a_view(ops: Any) -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        ops.scale(y[0], 3.0)
        ops.scale(x.t()[1], 2.0)
        return y, x

    same(f, one(3, 3, grad=False))


def test_returns_something_as_well(ops: Any) -> None:
    def f(x: Tensor) -> Any:
        rest = torch.zeros_like(x)
        return ops.split_off(x, rest), rest

    same(f, one(3, grad=False))


def test_changes_a_list(ops: Any) -> None:
    def f(x: Tensor) -> Any:
        a, b = x * 2, x + 1
        ops.both([a, b])
        return a, b

    fast, x = aheadgrad.compile(f, frontend="trace"), leaf(3, grad=False)
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="a list of tensors"):
        assert torch.equal(fast(x)[1], x + 2)


def test_beside_gradients(ops: Any) -> None:
    def f(x: Tensor) -> Tensor:
        mask = torch.ones(3)
        ops.scale(mask, 0.5)
        return (x * mask).sin()

    same(f, one(3))


def test_what_requires_grad_is_left_to_eager(ops: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        ops.scale(y, 3.0)
        return y

    fast = aheadgrad.compile(f, frontend="trace")
    x = leaf(3)
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="requires grad"):
        assert torch.equal(fast(x), f(x))


def test_effects_keep_their_order(ops: Any) -> None:
    def f(x: Tensor) -> Tensor:
        ops.note(x, "first")
        y = x * 2
        ops.note(y, "second")
        ops.note(x, "third")
        return y

    fast = strict(f)
    fast(leaf(3))
    LOG.clear()
    fast(leaf(3)).sum().backward()
    assert LOG == ["first", "second", "third"]


def test_effects_in_the_backward(ops: Any) -> None:
    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ops.note(x, "forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ops.note(grad, "backward")
            return grad * 2

    fast = strict(lambda x: Noting.apply(Noting.apply(x)))
    fast(leaf(3)).sum().backward()
    LOG.clear()
    fast(leaf(3)).sum().backward()
    assert LOG == ["forward", "forward", "backward", "backward"]


def test_an_effectful_op_stays_though_unused(ops: Any) -> None:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    handle = _register_effectful_op(ops.noted.default, _EffectType.ORDERED)
    try:

        def f(x: Tensor) -> Tensor:
            ops.noted(x, "unused")
            return x * 2

        fast = strict(f)
        fast(leaf(3, grad=False))
        LOG.clear()
        fast(leaf(3, grad=False))
        assert LOG == ["unused"]
    finally:
        handle.destroy()


# ---- control flow --------------------------------------------------------------------------------


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))


@pytest.mark.parametrize("grad", [False, True])
def test_cond(grad: bool) -> None:
    fast = same(branches, one(3, grad=grad))
    x = -leaf(3, grad=False)
    assert torch.equal(fast(x), branches(x))


def test_cond_with_several_results() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x, y: (x * y, [y * 2]), lambda x, y: (x + y, [x * 3]), (x, y))

    same(f, lambda: Inputs((leaf(3, grad=False), leaf(3, seed=1, grad=False))))


def test_map() -> None:
    same(lambda x: map_rows(lambda row: row.sin() + 1, x), one(3, 2, grad=False))


def test_scan() -> None:
    same(lambda x: scan(lambda c, row: (c + row, c * row), torch.zeros(2), x, dim=0), one(3, 2, grad=False))


def test_while_loop() -> None:
    def f(x: Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))

    fast = aheadgrad.compile(f, frontend="trace")
    x = leaf(3, grad=False)
    assert all(torch.equal(a, b) for a, b in zip(fast(x), f(x), strict=True))


def test_no_out_is_written_to_nothing() -> None:
    """`out=None` is what generated code likes to say."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tensordot(x.expand(3, -1), y, dims=((1,), (0,)), out=None)

    same(fn, lambda: leaves(leaf(1, 4), leaf(4, 2, seed=1)))


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_operators_of_python(frontend: str) -> None:
    """Their names (`__eq__`) are those of methods that any object has."""

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x == y, x != y, x < y, x >= y, ~(x == 0), x % 2, 1 - x, 2.0**x, x.__eq__(y), abs(-x)]

    compiled = aheadgrad.compile(fn, frontend=frontend, fallback="error")
    for x in (torch.randn(4), torch.arange(4)):
        for found, expected in zip(compiled(x, x.flip(0)), fn(x, x.flip(0)), strict=True):
            assert torch.equal(found, expected)


_TAKEN = "apply p0 saved given ctx t0 r0 above hide constant grads args links f_mul AUTOGRAD mul_1 held"


@pytest.mark.parametrize("name", _TAKEN.split())
def test_an_op_may_be_called_like_anything_in_generated_code(name: str) -> None:
    with torch.library._scoped_library("aheadgrad_names", "DEF") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_autograd(f"aheadgrad_names::{name}", lambda ctx, g: g * 2, lib=library)
        op = getattr(torch.ops.aheadgrad_names, name)

        def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            a = op(x.sin()) * y
            return op(a) * op(a * y), a

        def play(fn: Any) -> list[Any]:
            x, y = leaf(3), leaf(3, seed=1)
            out, a = fn(x, y)
            first = torch.autograd.grad((out + a).sum(), (x, y), create_graph=True)
            return [out, a, *first, *torch.autograd.grad((first[0] * first[1]).sum(), (x, y))]

        for ours, eager in zip(play(strict(f)), play(f), strict=True):
            torch.testing.assert_close(ours, eager)

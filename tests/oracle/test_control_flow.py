"""Control-flow operators in compiled functions: as in eager, and with derivatives of any order.

Eager's second derivatives of `cond`, `scan` and `while_loop` are wrong (torch 2.13), so all derivatives are
compared with those of the same function written in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.utils._pytree import tree_leaves

import aheadgrad
from aheadgrad.testing import Inputs, assert_same
from tests.oracle.common import leaf, strict

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LINEAR = nn.Linear(3, 3)


class Case(NamedTuple):
    fn: Callable[..., Any]
    written_out: Callable[..., Any]


def _cond(x: Tensor, w: Tensor) -> Any:
    h = x * 2
    return torch.cond(x.sum() > 0, lambda x: (x @ w).sin() * h, lambda x: x.cos() * w - h, (x,))


def _cond_in_python(x: Tensor, w: Tensor) -> Any:
    return (x @ w).sin() * (x * 2) if x.sum() > 0 else x.cos() * w - x * 2


def _trees(x: Tensor, w: Tensor) -> Any:
    def true(a: Any) -> Any:
        return {"p": a["q"] * w, "r": (a["q"].exp() + w,)}

    def false(a: Any) -> Any:
        return {"p": a["q"] + w, "r": (a["q"].sin() * w,)}

    return torch.cond(x.sum() > 0, true, false, ({"q": x},))


def _trees_in_python(x: Tensor, w: Tensor) -> Any:
    return (x * w, x.exp() + w) if x.sum() > 0 else (x + w, x.sin() * w)


def _in_place(x: Tensor, w: Tensor) -> Any:
    def true(x: Tensor) -> Tensor:
        y = x.sin()
        y.mul_(w)
        y[0] = 0
        return y

    return torch.cond(x.sum() > -100, true, lambda x: x.cos() * w, (x,))


def _in_place_in_python(x: Tensor, w: Tensor) -> Any:
    keep = torch.ones(3, 1)
    keep[0] = 0
    return x.sin() * w * keep


def _map(x: Tensor, w: Tensor) -> Any:
    return map_rows(lambda row: (LINEAR(row) @ w).sin() * w[0], x)


def _map_in_python(x: Tensor, w: Tensor) -> Any:
    return torch.stack([(LINEAR(row) @ w).sin() * w[0] for row in x])


def _scan(x: Tensor, w: Tensor) -> Any:
    return scan(lambda c, row: (c * row + 1, (c @ w).sin() * row), w[0], x, dim=0)


def _scan_in_python(x: Tensor, w: Tensor) -> Any:
    c, ys = w[0], []
    for row in x:
        ys.append((c @ w).sin() * row)
        c = c * row + 1
    return c, torch.stack(ys)


def _backwards(x: Tensor, w: Tensor) -> Any:
    return scan(lambda c, row: ([c[0] * row], {"y": c[0] + row}), [w[0]], x, dim=1, reverse=True)


def _backwards_in_python(x: Tensor, w: Tensor) -> Any:
    c, ys = w[0], []
    for row in reversed(x.unbind(1)):
        ys.append(c + row)
        c = c * row
    return c, torch.stack(ys[::-1], 1)


def _while(x: Tensor, w: Tensor) -> Any:
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, (a * w).sin()), (torch.tensor(0), x))


def _while_in_python(x: Tensor, w: Tensor) -> Any:
    for _ in range(3):
        x = (x * w).sin()
    return torch.tensor(3), x


def _never(x: Tensor, w: Tensor) -> Any:
    return while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * w.detach()), (torch.tensor(0), x))[1] * w


def _never_in_python(x: Tensor, w: Tensor) -> Any:
    return x * w


def _inside_each_other(x: Tensor, w: Tensor) -> Any:
    def combine(c: Tensor, row: Tensor) -> Any:
        y = torch.cond(row.sum() > 0, lambda r: (r @ w).sin(), lambda r: r * c, (row,))
        return c + y, y.clone()

    return scan(combine, torch.zeros(3), x, dim=0)


def _inside_each_other_in_python(x: Tensor, w: Tensor) -> Any:
    c, ys = torch.zeros(3), []
    for row in x:
        ys.append((row @ w).sin() if row.sum() > 0 else row * c)
        c = c + ys[-1]
    return c, torch.stack(ys)


CASES = {
    "cond": Case(_cond, _cond_in_python),
    "cond of trees": Case(_trees, _trees_in_python),
    "cond, written in place": Case(_in_place, _in_place_in_python),
    "map": Case(_map, _map_in_python),
    "scan": Case(_scan, _scan_in_python),
    "scan backwards": Case(_backwards, _backwards_in_python),
    "while": Case(_while, _while_in_python),
    "while, no step": Case(_never, _never_in_python),
    "one inside another": Case(_inside_each_other, _inside_each_other_in_python),
}


def derivatives(fn: Callable[..., Any], seed: int) -> list[Any]:
    """Results, first and second derivatives."""
    x, w = leaf(3, 3, seed=seed), leaf(3, 3, seed=seed + 10)
    outs = [t for t in tree_leaves(fn(x, w)) if t.is_floating_point()]
    inputs = x, w, LINEAR.weight
    first = torch.autograd.grad(
        [(t * (t + 1)).sum() for t in outs if t.requires_grad], inputs, create_graph=True, allow_unused=True
    )
    again = [(g * g).sum() for g in first if g is not None and g.requires_grad]
    return [*outs, *first, *torch.autograd.grad(again, inputs, allow_unused=True)]


def is_close(a: Any, b: Any) -> bool:
    """A gradient that is zero may be None in Python."""
    a, b = (torch.zeros(()) if t is None else t.detach() for t in (a, b))
    return torch.allclose(*torch.broadcast_tensors(a, b), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str, frontend: Any) -> None:
    if (name, frontend) == ("one inside another", "trace"):
        pytest.skip("a branch inside another function closes over what that one computed: left to eager")
    fn, written_out = CASES[name]
    compiled = aheadgrad.compile(fn, frontend=frontend, fallback="error")
    for seed in (1, 2, 3):
        found, expected = derivatives(compiled, seed), derivatives(written_out, seed)
        assert all(map(is_close, found, expected))
    assert len(compiled.entries) == 1


@pytest.mark.parametrize("name", ["cond", "map", "scan", "while"])
def test_as_in_eager(name: str) -> None:
    def make() -> Inputs:
        x, w = leaf(3, 3), leaf(3, 3, seed=5)
        return Inputs((x, w), leaves=[x, w])

    fn = CASES[name].fn
    assert_same(fn, strict(fn), make, backward=("all",), write_after=False, unit_strides=False)


def test_random_numbers_in_a_branch_are_left_to_eager_where_gradients_are_asked_for() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x.cos(), (x,))

    assert strict(fn)(leaf(3, grad=False)).shape == (3,)
    with pytest.raises(aheadgrad.errors.FallbackError, match="random"):
        strict(fn)(leaf(3))


def test_a_branch_that_changes_what_it_closes_over_is_left_to_eager() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        def true(x: Tensor) -> Tensor:
            n.add_(1)
            return x * n

        return torch.cond(x.sum() > 0, true, lambda x: x * 2, (x,))

    with pytest.raises(aheadgrad.errors.FallbackError, match="changes a tensor"):
        strict(fn)(leaf(3), torch.zeros(3))

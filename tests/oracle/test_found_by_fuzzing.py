"""Small programs that generated ones were reduced to, where a compiled call once differed from eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad
from aheadgrad.testing import Inputs, assert_same

from .common import leaf, one, same, strict
from .plays import assert_alike, ending


def unsqueezed(x: Tensor) -> Tensor:
    v = torch.hypot(x, x)
    with torch.no_grad():
        v.unsqueeze_(-1)
    return v


def squeezed(x: Tensor) -> Tensor:
    x[..., 1:] = 2
    with torch.no_grad():
        x.squeeze_()
    return x


@pytest.mark.parametrize(("fn", "shape"), [(unsqueezed, (2, 3)), (squeezed, (1,))])
def test_a_shape_changed_out_of_autograds_sight(fn: Any, shape: tuple[int, ...]) -> None:
    """Autograd refuses gradients of the new shape, also where nobody wants what is computed from them."""

    def play(f: Any) -> Any:
        x, other = leaf(*shape), leaf(2)
        out = f(x.clone())
        for wanted in ([x], [other]):
            with pytest.raises(RuntimeError, match="invalid gradient at index 0"):
                torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
        return out.detach()

    assert_alike(ending(play, fn), ending(play, strict(fn)))


def test_gradients_that_can_be_had_of_several_outputs() -> None:
    """`v` is changed after `hypot` kept it: gradients of `c` raise, those of `a` are there."""

    def fn(a: Tensor, c: Tensor) -> Any:
        v = c.exp()
        out = torch.hypot(v, v)
        return out, v.mul_(a)

    def play(f: Any) -> Any:
        a, c = leaf(3, seed=1), leaf(3, seed=2)
        outs = f(a, c)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad([o.sum() for o in outs], c, retain_graph=True)
        return torch.autograd.grad([o.sum() for o in outs], a, create_graph=True)

    assert_alike(ending(play, fn), ending(play, strict(fn)))


def test_parts_of_views_made_under_no_grad() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.data.mul_(2)
        return a.unbind(0)[0]

    def play(f: Any) -> Any:
        x = leaf(3, 3)
        base = x * 1
        with torch.no_grad():
            view = base[:]
        f(view, view.t()).sum().backward()
        return x.grad, base.detach()

    assert_alike(ending(play, fn), ending(play, strict(fn)))


def test_versions_of_a_tensor_that_gets_other_memory() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.resize_(9)
        return a.set_(b)

    def play(f: Any) -> Any:
        a, b = leaf(3, 3, grad=False), leaf(3, 3, seed=1, grad=False)
        before = a._version
        return f(a, b), a._version - before

    assert_alike(ending(play, fn), ending(play, strict(fn)))


def test_views_of_an_input_that_is_cut_off_and_reshaped() -> None:
    def fn(a: Tensor) -> Tensor:
        a.detach_()
        v = a[:, 1:]
        a.swapaxes_(0, -1)
        return v

    def play(f: Any) -> Any:
        a, factor = leaf(2, 3), leaf(seed=1)
        out = f(a)
        out.mul_(factor)
        a.sum().backward()
        return factor.grad, out._base is a, a.detach()

    assert_alike(ending(play, fn), ending(play, strict(fn)))


def test_names_of_values_are_not_those_of_functions_around_them() -> None:
    """Through Dynamo; a passage between two nodes is made with `empty_strided`, and so is a value."""

    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        a.unsqueeze(0).exp_()
        v = torch.where(a > 2.0, a, 2.0)
        a[:] = v
        return a, v

    def play(f: Any) -> Any:
        x = leaf(3, 3)
        a, v = f((x * 1)[:, 0])
        return torch.autograd.grad(v.sum(), x), a.detach()

    assert_alike(ending(play, fn), ending(play, aheadgrad.compile(fn, fallback="error")))


def test_a_changed_alias_of_an_argument_that_a_node_leads_to() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b.index_put_((torch.tensor([0]),), c)
        twice = torch.cat([a, a], -1)
        v = twice * 2.0
        v.index_put_((torch.tensor([0]),), c)
        return torch.stack([torch.cat([b, b], -1), v]), c, twice

    def play(f: Any) -> Any:
        x, c = leaf(3), leaf(seed=1)
        a = x * 1
        out, _, twice = f(a, a.detach(), c)
        return torch.autograd.grad(out.sum() + twice.sum(), [x, c]), out.detach(), a.detach()

    assert_alike(ending(play, fn), ending(play, aheadgrad.compile(fn, fallback="error")))


def with_views(d: Tensor) -> tuple[Tensor, ...]:
    return d[:2], d[1:], d


def filled(d: Tensor) -> Tensor:
    return d.data.fill_(3.0)


@pytest.mark.parametrize("options", [{}, {"partition": "min_cut"}])
@pytest.mark.parametrize(
    "seen",
    [
        lambda v: v.data,
        lambda v: with_views(v.data),
        lambda v: v.data.requires_grad_(),
        lambda v: v.detach().data.detach(),
        lambda v: v.data.view(1, 3),
        lambda v: filled(v[:2]),
    ],
)
def test_what_data_gives_of_a_saved_tensor(seen: Any, options: Any) -> None:
    """Eager does not notice when it is written to, and its backward sees what was written."""

    def fn(a: Tensor) -> Any:
        v = a.sin()
        return v * v, seen(v)

    compiled = aheadgrad.compile(fn, frontend="trace", fallback="error", **options)
    assert_same(fn, compiled, one(3))


@pytest.mark.parametrize("reshape", [lambda a: a, lambda a: a.resize_(9)])
def test_writes_through_expanded_views_of_an_input_at_an_offset(reshape: Any) -> None:
    def fn(a: Tensor) -> Any:
        v = a.expand(2, -1, -1)
        reshape(a)
        v[0] = 2.0
        return v, a

    def make() -> Inputs:
        base = leaf(4, 3, grad=False)
        return Inputs((base[1:],), watched=[base])

    same(fn, make)


@pytest.mark.parametrize("kind", [Tensor, TwoTensor])
def test_a_changed_input_that_several_nodes_lead_to(kind: Any) -> None:
    def fn(a: Tensor) -> Any:
        a.mul_(2)
        v = a.sin()
        return v * a, v

    def make() -> Inputs:
        x = leaf(3) if kind is Tensor else TwoTensor(leaf(3), leaf(3, seed=1)).detach().requires_grad_()
        return Inputs((x * 1,), leaves=[x])

    same(fn, make)


def test_a_part_of_a_changed_tensor_that_a_formula_takes_again() -> None:
    """The double backward of layer_norm looks at its input again, through another split."""

    def fn(x: Tensor) -> Tensor:
        v = x * 2
        v *= 0.5
        part = v.split(1)[-1]
        return torch.nn.functional.layer_norm(part, part.shape)

    same(fn, one(3))
    same(fn, one(3), order=2)


def test_what_is_not_wanted_is_not_looked_at_behind_links() -> None:
    """The engine goes to the first node for `c`; nobody wants what comes there for `a`, which has changed."""

    def fn(a: Tensor, c: Tensor) -> Tensor:
        out = c / (a.abs() + 1)
        a.detach().zero_()
        return out

    def play(f: Any) -> Any:
        x, y = leaf(3), leaf(3, seed=1)
        a, c, tangent = x * 1.5, y.clone(), leaf(3, seed=2)
        (first,) = torch.autograd.grad(f(a, c), c, tangent, create_graph=True)
        return first, *torch.autograd.grad(first.sum(), (c, tangent), allow_unused=True, create_graph=True)

    assert_alike(play(fn), play(strict(fn)))


def test_strides_of_what_data_was_written_of() -> None:
    def fn(x: Tensor) -> Tensor:
        v = x.exp()
        v.data.mul_(3)
        return v

    same(fn, one(0, 1, 3))

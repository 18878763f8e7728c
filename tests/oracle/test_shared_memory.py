"""Inputs that share memory, one of which is changed: views, other dtypes, histories of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.testing import Inputs, assert_same
from tests.oracle.common import leaf, same, strict


def numbers(*shape: int) -> Tensor:
    return leaf(*shape, grad=False)


def grown(*shape: int) -> tuple[Tensor, Tensor]:
    """A leaf and a tensor with a history."""
    x = leaf(*shape)
    return x, x * 1


def plain(make: Callable[[Tensor], tuple[Any, ...]], *shape: int) -> Callable[[], Inputs]:
    return lambda: Inputs(make(numbers(*shape)))


def tracked(make: Callable[[Tensor], tuple[Any, ...]], *shape: int) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        x, y = grown(*shape)
        args = make(y)
        own = [t for t in args if t.is_leaf and t.requires_grad]
        return Inputs(args, leaves=[x, *own], watched=[y])

    return inputs


def with_own_history(x: Tensor) -> tuple[Tensor, Tensor]:
    other = x.detach()
    return x, other.add_(leaf(8, seed=5) * 0)


CASES: dict[str, Callable[[], Inputs]] = {
    "overlapping in part": plain(lambda x: (x[0:5].detach(), x[3:8].detach()), 8),
    "overlapping views": plain(lambda x: (x[0:5], x[3:8]), 8),
    "side by side": plain(lambda x: (x[0:4], x[4:8]), 8),
    "interleaved": plain(lambda x: (x[::2], x.detach()[1::2]), 8),
    "a part and all": plain(lambda x: (x[2:4].detach(), x), 8),
    "data": plain(lambda x: (x, x.data), 8),
    "integers": plain(lambda x: (x, x.view(torch.int32)), 8),
    "halves": plain(lambda x: (x, x.view(torch.int16)[4:8]), 8),
    "bytes": plain(lambda x: (x, x.detach().view(torch.uint8)), 8),
    "rows of integers": plain(lambda x: (x, x.view(torch.int32)[:, 1:3]), 4, 4),
    "transposed integers": plain(lambda x: (x.t(), x.detach().view(torch.int32).t()), 4, 4),
    "complex and real": plain(lambda x: (torch.view_as_complex(x), x), 4, 2),
    "detached": tracked(lambda x: (x, x.detach()), 8),
    "detached views": tracked(lambda x: (x[1:], x.detach()[:4]), 8),
    "integers of a tracked one": tracked(lambda x: (x, x.detach().view(torch.int32)), 8),
    "leaf and not": tracked(lambda x: (x.detach().requires_grad_(), x), 8),
    "two histories": tracked(with_own_history, 8),
}


def change_first(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return a * 1, b * 1


def change_second(a: Tensor, b: Tensor) -> Any:
    b.mul_(2)
    return a * 3, b


def change_hidden(a: Tensor, b: Tensor) -> Any:
    with torch.no_grad():
        b.add_(1)
    return a * a, b


def change_through_view(a: Tensor, b: Tensor) -> Any:
    a.view(-1)[:2].zero_() if a.is_contiguous() else a[0].zero_()
    return a + 1, b + 1


@pytest.mark.parametrize("f", [change_first, change_second, change_hidden, change_through_view])
@pytest.mark.parametrize("case", CASES)
def test_inputs_that_share_memory(case: str, f: Any) -> None:
    same(f, CASES[case])


def test_gradients_reach_a_leaf_among_them() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        b.addcmul_(a.sum(), a.sum())
        return a

    same(f, CASES["leaf and not"])


def test_other_overlap_is_another_entry() -> None:
    fast = strict(change_first)
    for offsets in ((0, 2), (1, 3), (0, 0), (0, 4)):
        made = [numbers(8), numbers(8)]
        for x, run in zip(made, (change_first, fast), strict=True):
            run(x[offsets[0] :][:4].detach(), x[offsets[1] :][:4].detach())
        assert torch.equal(*made)
    assert len(fast.entries) == 4


def test_the_same_tensor_in_another_dtype_twice() -> None:
    def make() -> Inputs:
        x = numbers(8)
        bits = x.view(torch.int32)
        return Inputs((x, bits, bits))

    def f(x: Tensor, b: Tensor, c: Tensor) -> Any:
        b.bitwise_and_(-2)
        return x + 1, c

    same(f, make)


def test_a_mask_on_the_sign_bit() -> None:
    def f(x: Tensor, bits: Tensor) -> Tensor:
        bits.bitwise_and_(0x7FFFFFFF)
        return x * 1

    x = numbers(8)
    strict(f)(x, x.view(torch.int32))
    assert torch.equal(x, numbers(8).abs())


UNCOMPILED = {
    "data of a tracked one": (tracked(lambda x: (x, x.data), 8), change_hidden),
    "a leaf that is a view": (tracked(lambda x: (x.detach()[2:6].requires_grad_(), x), 8), change_second),
}


@pytest.mark.parametrize("case", UNCOMPILED)
def test_left_to_eager(case: str) -> None:
    make, f = UNCOMPILED[case]
    fast = aheadgrad.compile(f, frontend="trace")
    with pytest.warns(aheadgrad.errors.FallbackWarning):
        fast(*make().args)
    assert_same(f, fast, make)


def test_a_sibling_elsewhere_shares_the_version_counter() -> None:
    """The two do not touch, but eager refuses what it saved before the counter moved on."""

    def f(a: Tensor, c: Tensor) -> Tensor:
        out = torch.nn.functional.silu(c)
        a.mul_(0.5)
        return out

    def make() -> Inputs:
        x = numbers(3, 3)
        c = x[:2].detach().requires_grad_()
        return Inputs((x[2], c), {}, leaves=[c])

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        f(*make().args).sum().backward()
    same(f, make)


def test_an_input_changed_through_a_view_and_saved_inside() -> None:
    """What `exp_` keeps is the input's memory, hidden in the history of a write to a view."""

    def f(a: Tensor) -> Tensor:
        a.unsqueeze(0).exp_()
        parts = a.square().chunk(2)
        with torch.no_grad():
            parts[1].fill_(2.0)
        return parts[0]

    def make() -> Inputs:
        x = numbers(3).requires_grad_()
        return Inputs((x * 1,), {}, leaves=[x])

    same(f, make)


def test_a_member_is_read_where_the_owner_has_gaps() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        b.swapaxes_(0, -1)
        a.masked_fill_(a > 0, 2.0)
        return b

    def make() -> Inputs:
        x = numbers(2, 1, 4)[..., 1:]
        return Inputs((x, x.view_as(x)), {}, leaves=[])

    same(f, make)


def test_a_function_returns_an_argument_that_changed_its_shape() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        a.transpose_(0, 1)
        return torch.broadcast_tensors(a, a)

    def make() -> Inputs:
        x = numbers(2, 2)
        return Inputs((x, x.view_as(x)), {}, leaves=[])

    same(f, make)


@pytest.mark.parametrize("write", ["no_grad", "data", "detach", "in sight"])
@pytest.mark.parametrize("view", [lambda b: b.view(-1), lambda b: b[1:], lambda b: b.split(2)[0]])
def test_a_view_of_a_sibling_leads_to_it(write: str, view: Callable[[Tensor], Tensor]) -> None:
    """It was made from the base that both are views of: `grad` of the sibling was None."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        if write == "in sight":
            a.add_(1.0)
        else:
            with torch.no_grad():
                {"no_grad": a, "data": a.data, "detach": a.detach()}[write].add_(1.0)
        return view(b)

    found = []
    for run in (fn, aheadgrad.compile(fn, fallback="error", frontend="trace")):
        x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        base = x.sin()
        a, b = base[...], base.squeeze()
        found.append(torch.autograd.grad(run(a, b).sum(), [x, b]))
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(eager, ours)


def test_a_sibling_of_one_that_is_reshaped_out_of_sight_has_a_gradient() -> None:
    """It was lost, as if the sibling had been reshaped, too."""

    def fn(p: Tensor, q: Tensor) -> Tensor:
        with torch.no_grad():
            q.unsqueeze_(0)
        return p * p

    found = []
    for run in (fn, strict(fn)):
        x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        base = x.sin()
        p, q = base[...], base.view(-1)
        out = run(p, q)
        found.append(torch.autograd.grad(out.sum() + p.sum(), [p, x]))
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(eager, ours)

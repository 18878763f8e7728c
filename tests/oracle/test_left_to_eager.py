"""Changes of shape, memory and history that a recording cannot follow: they run uncompiled, never wrong.

And next to each of them what is like it, but compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad
from aheadgrad.testing import Inputs

from .common import leaf, one, same, uncompiled

Make = Callable[[], Inputs]


def plain() -> Inputs:
    return Inputs((leaf(3, 3, grad=False),))


def grown() -> Inputs:
    x = leaf(4, 3)
    return Inputs((x * 1,), leaves=[x])


def view_of_plain() -> Inputs:
    base = leaf(4, 3, grad=False)
    return Inputs((base[1:],), watched=[base])


def leaf_with_offset() -> Inputs:
    base = leaf(4, 3, grad=False)
    x = base[1:].detach().requires_grad_()
    return Inputs((x,), leaves=[x], watched=[base])


def hidden_view() -> Inputs:
    """Made under no_grad, of a tensor with a history: requires grad, and is a leaf."""
    x = leaf(3, 3)
    base = x * 1
    with torch.no_grad():
        view = base[:]
    return Inputs((view,), leaves=[x], watched=[base])


def padded() -> Inputs:
    return Inputs((leaf(2, 4, grad=False)[:, :-1].detach(),))


# --- out= ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True])
def test_out_resizes_an_input(view: bool) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        torch.sin(b, out=a)
        return a * 2

    def make() -> Inputs:
        a = leaf(2, 3, grad=False).t() if view else leaf(2, grad=False)
        return Inputs((a, leaf(2, 3, grad=False, seed=1)))

    uncompiled(fn, make, "out= resizes an input or a view")


def test_out_resizes_a_tensor_that_has_views() -> None:
    def fn(b: Tensor) -> Any:
        a = torch.zeros(6)
        v = a[2:]
        torch.sin(b, out=v)
        return a, v

    uncompiled(fn, plain, "out= resizes an input or a view")


def test_out_makes_a_new_tensor() -> None:
    def fn(b: Tensor) -> Tensor:
        a = torch.empty(0)
        torch.sin(b, out=a)
        return a * 2

    same(fn, plain)


# --- memory beyond an input, or shared by its elements ------------------------------------------------


def beyond(a: Tensor) -> Tensor:
    v = a.as_strided((4,), (1,), 0)
    v.neg_()
    return v


def test_as_strided_beyond_an_input() -> None:
    uncompiled(beyond, view_of_plain, "lies outside of it")


def test_a_write_through_as_strided_of_an_input_at_an_offset() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.as_strided((2, 1), (1, 3))
        v[0].mul_(0.5)
        return a

    def given() -> Inputs:
        x = leaf(4, 3)
        return Inputs(((x * 2)[1:],), leaves=[x])

    uncompiled(fn, given, "from an input at an offset")


def test_as_strided_inside_an_input() -> None:
    same(beyond, plain)


def test_as_strided_into_the_gaps_of_an_input() -> None:
    same(lambda a: a.as_strided((7,), (1,)).sum(), padded)


def test_elements_that_share_memory_are_written() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.as_strided((2, 2), (1, 1), 0)
        v.add_(1)
        return v * 2

    uncompiled(fn, plain, "elements of a written tensor share memory")


def test_an_expanded_tensor_is_copied_onto_itself() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.expand(2, -1, -1)
        v[:] = v
        return v

    uncompiled(fn, grown, "copy_ writes to an expanded tensor")


def test_an_input_is_resized_twice() -> None:
    def fn(a: Tensor) -> Tensor:
        a.resize_(2, 2)
        a.resize_(9)
        return a * 2

    uncompiled(fn, plain, "changes its shape again")


# --- changes of shape ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seen_first", [True, False])
def test_a_change_of_shape_in_sight_and_one_out_of_sight(seen_first: bool) -> None:
    def fn(a: Tensor) -> Tensor:
        for seen in (seen_first, not seen_first):
            with torch.set_grad_enabled(seen):
                a.t_()
        return a.sin()

    uncompiled(fn, grown, "with grad mode on, and again with grad mode off")


def test_a_view_from_before_a_change_of_shape_out_of_sight() -> None:
    def fn(a: Tensor) -> Any:
        v = a.reshape(-1)
        with torch.no_grad():
            a.t_()
        return v[:1], v

    uncompiled(fn, grown, "a view from before is used")


@pytest.mark.parametrize("make", [plain, padded, view_of_plain])
def test_a_change_of_shape_undone_before_a_write(make: Make) -> None:
    def fn(a: Tensor) -> None:
        a.t_()
        v = a.t()
        a.t_()
        v.abs_()

    same(fn, make)


def test_a_view_cannot_be_detached_in_place_after_a_change_of_shape() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a[:2]
        v.unsqueeze_(0)
        v.detach_()
        return v

    same(fn, plain)


# --- histories ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_field", [True, False])
def test_a_view_from_before_requires_grad(by_field: bool) -> None:
    def fn(a: Tensor) -> Any:
        v = a[0]
        if by_field:
            a.requires_grad = True
        else:
            a.requires_grad_()
        return v, a * 2

    uncompiled(fn, plain, "comes to require grad after views of it were taken")


@pytest.mark.parametrize("make", [plain, leaf_with_offset])
def test_requires_grad_without_views(make: Make) -> None:
    def fn(a: Tensor) -> Any:
        a.requires_grad_()
        return a[0], a * 2

    same(fn, make)


@pytest.mark.parametrize("make", [plain, view_of_plain])
def test_a_view_is_made_a_leaf(make: Make) -> None:
    def fn(a: Tensor) -> Any:
        v = a[:2]
        v.requires_grad_()
        a.fill_(v.sum())
        return v[:1], v

    uncompiled(fn, make, "a view is made a leaf, and its memory is written to")


def stop_requiring_grad(t: Tensor) -> None:
    t.requires_grad = False


CUTS: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda t: t.detach_(),
    "function": lambda t: torch.detach_(t),
    "requires_grad_": lambda t: t.requires_grad_(False),
    "requires_grad": stop_requiring_grad,
}


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("write_first", [True, False])
def test_a_leaf_with_an_offset_is_cut_off_and_written_to(how: str, write_first: bool) -> None:
    cut = CUTS[how]

    def fn(a: Tensor) -> Tensor:
        if write_first:
            with torch.no_grad():
                a.mul_(2)
        cut(a)
        a.data.add_(1)
        return a

    same(fn, leaf_with_offset)


def test_a_leaf_is_cut_off_after_views_were_taken() -> None:
    def fn(a: Tensor) -> Any:
        v = a[0]
        a.requires_grad_(False)
        a.mul_(2)
        return a, v * 2

    uncompiled(fn, leaf_with_offset, "stops requiring grad after views of it were taken, and is changed")


def test_cut_off_and_made_a_leaf() -> None:
    def fn(a: Tensor) -> Tensor:
        a.detach_()
        a.requires_grad_()
        return a * 2

    uncompiled(fn, grown, "cut off from its history, and then gets a new one")


def test_cut_off_and_written_to_with_a_history() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.detach_()
        a.copy_(b)
        return a * 2

    def make() -> Inputs:
        x, y = leaf(3), leaf(3, seed=1)
        return Inputs((x * 1, y), leaves=[x, y])

    uncompiled(fn, make, "cut off from its history, and then gets a new one")


def test_made_a_leaf_and_cut_off() -> None:
    def fn(a: Tensor) -> Tensor:
        a.requires_grad_()
        c = a.sum()
        a.detach_()
        return c

    uncompiled(fn, plain, "made a leaf, and then cut off")


def test_a_hidden_view_is_written_to() -> None:
    def fn(a: Tensor) -> Tensor:
        c = a * 2
        with torch.no_grad():
            a.mul_(2)
        return c

    same(fn, hidden_view)


def test_a_hidden_view_changes_its_shape() -> None:
    def fn(a: Tensor) -> Any:
        c = a * 2
        with torch.no_grad():
            a.unsqueeze_(0)
        return a.detach(), c

    same(fn, hidden_view)


def test_requires_grad_is_set_on_a_view_that_autograd_refuses() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.split(1, 0)[-1]
        a.detach().copy_(a * 2)
        v.requires_grad_()
        return a.sigmoid()

    same(fn, grown)


@pytest.mark.parametrize("wanted", [True, False])
def test_requires_grad_is_set_on_a_hidden_view(wanted: bool) -> None:
    def fn(a: Tensor) -> Tensor:
        a.requires_grad_(wanted)
        return a * 2

    uncompiled(fn, hidden_view, "requires_grad is set on an input that is a view made under no_grad")


# --- other memory -------------------------------------------------------------------------------------


def view_of_grown() -> Inputs:
    x = leaf(4, 3)
    base = x * 1
    return Inputs((base[1:],), leaves=[x], watched=[base])


@pytest.mark.parametrize("make", [plain, grown, view_of_plain, view_of_grown])
@pytest.mark.parametrize("write_first", [True, False])
def test_data_is_set(make: Make, write_first: bool) -> None:
    def fn(a: Tensor) -> Tensor:
        if write_first:
            a.mul_(2)
        a.data = a.detach() * 3
        return a * 2

    uncompiled(fn, make, "the .data of a tensor is set")


@pytest.mark.parametrize("make", [view_of_plain, view_of_grown])
def test_set_of_an_input_that_is_a_view(make: Make) -> None:
    def fn(a: Tensor) -> Tensor:
        with torch.no_grad():
            a.set_(torch.ones(3))
        return a * 2

    uncompiled(fn, make, "set_ is called on a view")


def test_set_of_a_view_made_inside() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a[:2]
        v.set_(torch.ones(3))
        return v * 2

    uncompiled(fn, plain, "set_ is called on a view")


def test_set_with_a_history() -> None:
    def fn(a: Tensor) -> Tensor:
        a.set_(torch.ones(3))
        return a.detach() * 2

    uncompiled(fn, grown, "set_ is called with grad mode on")


def test_set_after_a_write() -> None:
    def fn(a: Tensor) -> Tensor:
        a.mul_(2)
        a.set_(torch.ones(3))
        return a * 2

    uncompiled(fn, plain, "set_ is called on an input that was written to")


def test_set_of_a_tensor_from_outside() -> None:
    outside = torch.zeros(3, 3)

    def fn(a: Tensor) -> Tensor:
        outside.set_(a * 2)
        return outside * 2

    uncompiled(fn, plain, "set_ is called on a tensor from outside")


def test_set_of_a_leaf_after_a_view_of_it_was_taken() -> None:
    def fn(a: Tensor) -> Any:
        v = a[:2]
        with torch.no_grad():
            a.set_(torch.ones(3, 3))
        return v, v * 2

    uncompiled(fn, one(3, 3), "a view is returned of an input that has other memory since")


def test_set_of_an_input() -> None:
    def fn(a: Tensor) -> Tensor:
        a.set_(torch.ones(3))
        return a * 2

    same(fn, plain)


def test_set_of_an_input_that_has_views() -> None:
    """Autograd takes them for views still, though they have no memory in common any more."""

    def fn(a: Tensor) -> Tensor:
        v = a.view(-1)
        a.set_(torch.ones(3, 3))
        return v

    uncompiled(fn, plain, "a view is returned of an input that has other memory since")


def test_as_strided_in_place_with_fewer_elements() -> None:
    def fn(a: Tensor) -> Tensor:
        a.as_strided_((2, 2), (1, 2))
        return a.reshape(-1) * 2

    same(fn, plain)

    def viewed(a: Tensor) -> Tensor:
        v = a[0]
        a.as_strided_((2, 2), (1, 2))
        return a.reshape(-1) * v[0]

    uncompiled(viewed, plain, "as_strided_ shrinks or grows a tensor that has views")

    def cut_off(a: Tensor) -> Tensor:
        a.as_strided_((2, 2), (1, 2))
        a.detach_()
        return a.sum()

    uncompiled(cut_off, plain, "a tensor that as_strided_ shrank or grew is cut off from its history")

    def unseen(a: Tensor) -> Tensor:
        with torch.no_grad():
            a.as_strided_((2, 2), (1, 2))
        return a.flatten()

    uncompiled(unseen, leaf_with_offset, "a tensor that requires grad, under no_grad")


def test_a_view_made_under_no_grad_of_an_input_that_then_stops_requiring_grad() -> None:
    def fn(a: Tensor) -> Tensor:
        with torch.no_grad():
            v = a.expand(2, -1, -1)
        a.requires_grad_(False)
        return a.sum() + v.sum()

    uncompiled(fn, leaf_with_offset, "after a view was made of it under no_grad")


def test_a_view_that_is_a_leaf_inside_and_then_gets_a_history() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a[:2]
        v.requires_grad_()
        return v * 2

    same(fn, plain)  # also when it is written to before backward
    for run in (fn, aheadgrad.compile(fn, fallback="error", frontend="trace")):
        a = torch.ones(3)
        out = run(a)
        a.mul_(torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="moved into the graph interior"):
            out.sum().backward()


def test_set_of_an_alias_of_an_input() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.detach()
        v.set_(torch.ones(3, 3))
        return v

    uncompiled(fn, plain, "set_ is called on an alias of an input")


def test_out_resizes_what_is_a_view_for_functionalization_only() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.t().flatten()
        torch.sin(a, out=v)
        return v

    uncompiled(fn, plain, "out= resizes an input or a view")


def test_an_alias_made_with_data_of_an_input_at_an_offset() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.data
        v.data.add_(1)
        return v if v.sum() is not None else a

    same(fn, view_of_plain)


# --- what eager's nodes and views do that gradients do not show -----------------------------------------


def test_a_derivative_of_nothing_that_was_given() -> None:
    """Eager's backward comes by `relu`, whose result was changed, though no gradient comes of it."""

    def fn(a: Tensor) -> Tensor:
        with torch.no_grad():
            v = a.view(-1)  # requires grad, as its base does
        out = v.relu()
        out[0] = a[0]
        return out

    uncompiled(fn, one(3), "derivatives of nothing that was given")


def test_a_derivative_of_a_leaf_inside() -> None:
    def fn(a: Tensor) -> Tensor:
        inner = a.detach().requires_grad_()
        return a.lerp_(inner.abs(), 0.5)

    uncompiled(fn, grown, "derivatives of nothing that was given")


def test_views_follow_inputs_that_come_to_require_grad() -> None:
    def make() -> Inputs:
        x = leaf(3, 3, grad=False)
        return Inputs((x, x.view_as(x)))

    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.requires_grad_()
        return b.t() * 2

    uncompiled(fn, make, "a tensor comes to require grad after views of it were taken")


def test_views_follow_inputs_that_stop_requiring_grad() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a[:2]
        a.requires_grad_(False)
        with torch.no_grad():
            v = v.view_as(v)
        return v * 2

    uncompiled(fn, one(3, 3), "a view is made under no_grad of an input that stopped requiring grad")


def test_a_view_of_a_view_that_changed_its_shape_under_no_grad() -> None:
    def fn(a: Tensor) -> Tensor:
        v = a.t()
        with torch.no_grad():
            v.unsqueeze_(0)
            v = v.unsqueeze(0)
        return v[0:1]

    uncompiled(fn, grown, "a view made partly under no_grad, of a tensor that changed its shape")


@pytest.mark.parametrize("history", [False, True])
def test_subclasses_that_change_their_shape_and_are_written_to(history: bool) -> None:
    def fn(a: Tensor, b: Tensor) -> None:
        a.unsqueeze_(-1)
        a.mul_(b.unsqueeze(-1))
        a.squeeze_(-1)

    def make() -> Inputs:
        x, y = (TwoTensor(leaf(3, seed=s), leaf(3, seed=s + 1)).detach().requires_grad_() for s in (1, 3))
        base = x * 1 if history else x.detach()
        return Inputs((base.view_as(base), y), leaves=[x, y] if history else [y])

    uncompiled(fn, make, "a view of a tensor subclass changes its shape, and")


def test_a_tensor_that_is_detached_and_has_views() -> None:
    def fn(a: Tensor) -> Tensor:
        b = a * -1.0
        v = b.t()
        b.detach_()
        return v

    uncompiled(fn, one(1, 3), "a tensor is cut off from its history after views of it were taken")

"""Programs that once disagreed with eager: one per cause, as small as they could be made.

Each test says in its name what went wrong. The oracle compares everything that BEHAVIOURS calls
"same", including what happens when the caller writes into a result afterwards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.errors import FallbackError

from .given import Given, check, every_other_column, matrix, plain, with_history

# ---- looks: sizes, strides and offsets after writes -------------------------------------------


def test_recipe_of_a_view_starts_from_how_eager_sees_its_root() -> None:
    def f(a: Tensor) -> Any:
        first, second, _ = a.unbind(0)
        a.index_fill_(0, torch.tensor([0]), 2)
        return first, second

    check(f, every_other_column)


def test_view_used_after_its_gappy_base_was_written() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        diagonal = a.diagonal()
        a.index_put_((torch.tensor([0, 0]),), b, accumulate=True)
        return diagonal.flatten()

    check(f, lambda: ([], (torch.arange(8.0).reshape(2, 4)[..., 1:].t().detach(), torch.tensor(1.5))))


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_data_of_a_part_after_its_gappy_base_was_written(frontend: str) -> None:
    def f(a: Tensor) -> Any:
        parts = a.chunk(3)
        a.clamp_(-1, 1)
        return parts[1].data

    check(f, lambda: ([], (torch.arange(9.0).reshape(3, 3).diagonal(),)), frontend=frontend)


def test_offset_of_an_empty_tensor_survives_a_write() -> None:
    def f(a: Tensor) -> Any:
        a.sigmoid_()
        a.transpose_(0, 1)
        return a

    check(f, lambda: ([], (torch.tensor(1.0).reshape(1, 1)[:, 1:],)))


def test_transposed_input_keeps_its_strides_after_a_write() -> None:
    def f(a: Tensor) -> Any:
        a[0] = 1.0
        return a.t().reshape(-1), a.as_strided((2,), (1,))

    check(f, lambda: ([], (torch.arange(6.0).reshape(2, 3).t(),)))


def test_write_of_a_base_whose_windows_leave_gaps() -> None:
    def f(a: Tensor) -> Any:
        windows = a.unfold(1, 2, 2)
        a.lerp_(a, 0.5)
        return windows + 3.0

    check(f, lambda: ([], (torch.arange(8.0).reshape(2, 4)[..., 1:].detach(),)))


def test_write_through_windows_that_do_not_overlap() -> None:
    def f(a: Tensor) -> Any:
        a = a * 2
        a.unfold(1, 2, 2).mul_(3.0)
        return a

    check(f, lambda: ([], (torch.arange(10.0).reshape(2, 5),)))


def test_write_of_nothing_through_windows_that_leave_a_gap() -> None:
    def f(a: Tensor) -> Any:
        a.unfold(0, 2, 2)[1:].mul_(3.0)
        return a * 1

    with pytest.raises(FallbackError, match="unfold"):
        aheadgrad.compile(f, fallback="error", frontend="trace")(torch.arange(3.0))


def test_unit_strides_of_unfold() -> None:
    check(lambda a: a.unfold(1, 2, 2), lambda: ([], (torch.tensor([[1.0, 2.0, 3.0]]),)))


# ---- shapes changed in place ----------------------------------------------------------------------


def test_view_that_looks_like_its_reshaped_base_is_another_tensor() -> None:
    def f(a: Tensor) -> Any:
        squeezed = a.squeeze()
        a.squeeze_()
        return squeezed

    check(f, plain)


def test_metadata_in_place_on_an_input_with_views() -> None:
    def f(a: Tensor) -> Any:
        row = a[0]
        a.t_()
        return row * 2, a

    check(f, with_history)


def test_metadata_in_place_on_an_intermediate_with_views() -> None:
    def f(a: Tensor) -> Any:
        b = a * 2
        row = b[0]
        b.t_()
        row.mul_(3.0)
        return row, b

    check(f, matrix)


def test_metadata_in_place_on_a_view() -> None:
    def f(a: Tensor) -> Any:
        b = a * 2
        c = b[:, 1:]
        c.unsqueeze_(0)
        c.add_(1.0)
        return b, c

    check(f, matrix)


# ---- what kernels refuse ------------------------------------------------------------------------


def test_slice_assignment_into_an_expanded_tensor_raises() -> None:
    def f(a: Tensor) -> Any:
        a.expand(2, 3)[..., 1:] = 0.5
        return a

    check(f, plain)


def test_assignment_of_a_tensor_to_its_own_view() -> None:
    def f(a: Tensor) -> Any:
        a[None][...] = a
        return a

    check(f, plain)


def test_assignment_of_a_row_to_the_whole() -> None:
    def f(a: Tensor) -> Any:
        a[:] = a.split(1, 0)[-1]
        return a

    check(f, lambda: ([], (torch.arange(6.0).reshape(2, 3),)))


def test_assignment_that_reads_what_it_writes_runs_uncompiled() -> None:
    def f(a: Tensor) -> Any:
        a[:] = a.unbind(-2)[0]
        return a

    with pytest.raises(FallbackError, match="order"):
        aheadgrad.compile(f, fallback="error", frontend="trace")(torch.arange(12.0).reshape(2, 2, 3))


def test_assignment_of_an_element_to_the_whole() -> None:
    def f(a: Tensor) -> Any:
        element = a[1]
        a[...] = element
        return element

    check(f, plain)


def test_expanded_tensor_assigned_to_itself() -> None:
    def f(a: Tensor) -> Any:
        b = torch.zeros(()).expand(3)
        b[:] = b
        return a + b

    check(f, plain)


def test_detach_in_place_of_an_input_that_is_a_view_raises() -> None:
    def f(a: Tensor) -> Any:
        a.detach_()
        return a

    check(f, lambda: ([], (torch.ones(3).unsqueeze(0),)))


def test_detach_in_place_is_checked_again_for_a_view() -> None:
    def f(a: Tensor) -> Tensor:
        a.detach_()
        return a * 2

    compiled = aheadgrad.compile(f, frontend="trace")
    compiled(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="detach views"):
        compiled(torch.ones(3).unsqueeze(0))


def test_complex_values_do_not_fit_into_real_memory_seen_through_data() -> None:
    def f(a: Tensor) -> Any:
        b = a.squeeze()
        b.data.add_(torch.complex(a, a))
        return a

    check(f, plain)


def test_index_copy_of_another_dimensionality_raises_the_same() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        b.index_copy_(0, torch.tensor([0]), a.unsqueeze(0))
        return a

    check(f, lambda: ([], (torch.ones(3), torch.ones(2, 2, 3))))


# ---- inputs that share memory ---------------------------------------------------------------------


def test_part_of_a_split_used_after_its_sibling_was_changed() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        out = b.cumsum(0)
        a.neg_()
        return out

    def make() -> Given:
        leaf = torch.arange(4.0, requires_grad=True)
        base = leaf * 1.5
        return [leaf], (base[:2], base.split(2)[1])

    check(f, make)


def test_view_made_under_no_grad_of_an_input_that_is_a_view() -> None:
    def f(b: Tensor, c: Tensor) -> Any:
        b.copy_(b.detach())
        with torch.no_grad():
            part = b[::2]
        return part.unsqueeze(-3)

    def make() -> Given:
        leaf = torch.arange(12.0).reshape(2, 2, 3).requires_grad_()
        base = leaf.sin()
        return [leaf], (base.unsqueeze(-1), base)

    check(f, make)


def test_overlapping_views_one_of_them_changed() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        a.mul_(2.0)
        return b.sin()

    def make() -> Given:
        leaf = torch.arange(4.0, requires_grad=True)
        base = leaf * 1.5
        return [leaf], (base[:3], base[1:])

    check(f, make)


def test_view_of_a_gappy_input_reshaped_in_place_after_a_write() -> None:
    def f(a: Tensor) -> Any:
        view = a.view_as(a)
        view.mul_(-1.0)
        view.unsqueeze_(0)
        return view

    check(f, every_other_column)


# ---- called again in other ways ----------------------------------------------------------------


def test_unused_as_strided_out_of_bounds() -> None:
    def f(a: Tensor) -> Any:
        a.sigmoid().as_strided((4,), (1,))
        return a + 1

    for n in (4, 2):
        check(f, lambda n=n: ([], (torch.ones(n),)))


def test_as_strided_reaches_beyond_an_input_into_its_storage() -> None:
    check(lambda a: a.as_strided((4,), (1,)) * 2, lambda: ([], (torch.arange(4.0)[:2],)))


def test_views_of_a_view_of_a_leaf_changed_in_place() -> None:
    def reshaped(a: Tensor) -> Any:
        a.view(-1).unsqueeze_(-1)
        return a * 2

    def written(a: Tensor) -> Any:
        a[:1].fill_(1.5)
        first, _ = a.split(1)
        return first

    def given() -> Given:
        x = torch.ones(3, requires_grad=True)
        return [x], (x[:],)

    for f in (reshaped, written):
        check(f, given)


def test_an_index_is_looked_at_before_the_leaf() -> None:
    def f(a: Tensor) -> Any:
        a[..., 1:] = -1.0
        return a * 2

    def given() -> Given:
        x = torch.tensor(1.5, requires_grad=True)
        return [x], (x.view_as(x),)

    check(f, given)


def test_a_shape_is_returned_beside_what_is_saved() -> None:
    """What may be given away was looked for among all results, and a shape is none."""

    def f(a: Tensor) -> Any:
        return a.sin(), a.shape

    check(f, matrix)


def test_an_input_that_is_transposed_in_place_is_saved_as_it_was_read() -> None:
    def f(a: Tensor) -> Any:
        a.t_()
        return a.square()

    def given() -> Given:
        x = torch.tensor([[-0.81, 0.99, 1.56]], requires_grad=True)
        return [x], (x * 1,)

    check(f, given)

"""Outputs that are inputs, views of inputs, or views of intermediates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from . import programs as p
from .common import Inputs, verify
from .peer import compile_with_dynamo

GRAD = pytest.mark.parametrize("grad", [True, False])
Entry = Callable[..., Any]


def grad_differs(why: str) -> pytest.MarkDecorator:
    """With and without grad, where the peer does otherwise with it."""
    marked = pytest.param(True, marks=pytest.mark.differs_from_peer(why))
    return pytest.mark.parametrize("grad", [marked, False])


# -- views of inputs -----------------------------------------------------------------------------


def test_input_returned_by_a_custom_function() -> None:
    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    verify(HalfGradient.apply, p.leaves(1, 2, 3))


@GRAD
def test_view_of_an_input(grad: bool) -> None:
    verify(p.flat, p.leaves(1, 2, 2, grad=grad), nonleaf=True)


@GRAD
def test_views_of_changed_and_unchanged_inputs(grad: bool) -> None:
    verify(p.scale_two_view_two, p.leaves(3, 2, 2, grad=grad), nonleaf=True)


@GRAD
def test_views_of_inputs_changed_in_data_and_in_metadata(grad: bool) -> None:
    verify(p.scale_one_transpose_one_view_all, p.leaves(3, 2, 2, grad=grad), nonleaf=True)


@GRAD
def test_view_of_a_changed_input(grad: bool) -> None:
    verify(p.increment_and_flat, p.leaves(1, 2, 2, grad=grad), nonleaf=True)


@GRAD
def test_diagonal_of_a_transposed_input(grad: bool) -> None:
    verify(p.transpose_increment_diagonal, p.leaves(4, 2, 2, grad=grad), nonleaf=True)


# -- views of intermediates ----------------------------------------------------------------------


@GRAD
def test_write_into_an_output_shows_in_its_alias(grad: bool, entry: Entry) -> None:
    def doubled_and_flat(x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x.mul(2)
        return doubled, doubled.view(-1)

    compiled = entry(doubled_and_flat)
    x = torch.randn(3, requires_grad=grad)
    found, expected = compiled(x), doubled_and_flat(x)
    for outputs in (found, expected):
        outputs[0].mul_(3)
    torch.testing.assert_close(list(found), list(expected))


@GRAD
def test_one_view(grad: bool) -> None:
    verify(p.triple_flat, p.leaves(1, 3, 3, grad=grad))


@GRAD
def test_view_beside_an_unrelated_output(grad: bool) -> None:
    verify(p.triple_flat_beside, lambda: [torch.randn(3, 3), torch.randn(3, 3, requires_grad=grad)])


@GRAD
def test_base_returned_twice_around_its_view(grad: bool) -> None:
    def around(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tripled = torch.mul(x, 3)
        return tripled, tripled.view(-1), tripled

    verify(around, p.leaves(1, 3, 3, grad=grad))


@GRAD
def test_two_views(grad: bool) -> None:
    verify(p.triple_flat_twice, p.leaves(1, 3, 3, grad=grad))


@GRAD
def test_view_before_its_base(grad: bool) -> None:
    verify(p.triple_view_then_base, p.leaves(1, 3, 3, grad=grad))


@GRAD
def test_view_after_its_base(grad: bool) -> None:
    verify(p.triple_base_then_view, p.leaves(1, 3, 3, grad=grad))


@GRAD
def test_view_base_and_detached_row(grad: bool) -> None:
    verify(p.triple_view_base_detached_row, p.leaves(1, 3, 3, grad=grad))


@GRAD
def test_views_of_two(grad: bool) -> None:
    verify(p.views_of_two, p.leaves(1, 3, 3, grad=grad))


@GRAD
def test_every_kind_of_view(grad: bool) -> None:
    def make() -> Inputs:
        root = torch.randn(1, 2, 4, requires_grad=grad)
        return Inputs([root], [root.clone()])

    verify(p.every_kind_of_view, make)


def test_view_of_a_sum_written_with_the_decompositions_of_inductor(entry: Entry) -> None:
    from torch._inductor.decomposition import decompositions

    def flat_sum(x: Tensor) -> Tensor:
        return (x + 1).view(-1)

    compiled = entry(flat_sum, decompositions=decompositions)
    x = torch.randn(3, 3, requires_grad=True)
    torch.testing.assert_close(compiled(x).mul_(2), flat_sum(x).mul_(2))


# -- an intermediate's own metadata changes ------------------------------------------------------


@grad_differs("writing into the output is refused; its own test of this is to be fixed")
def test_intermediate_transposed_in_place(grad: bool) -> None:
    def transposed(x: Tensor) -> Tensor:
        tripled = torch.mul(x, 3)
        tripled.t_()
        return tripled

    verify(transposed, p.leaves(1, 2, 4, grad=grad))


@GRAD
def test_intermediate_transposed_in_place_and_detached(grad: bool) -> None:
    verify(p.triple_transposed_detached, p.leaves(1, 2, 4, grad=grad))


@grad_differs("raises; its own test of this is to be fixed")
def test_views_before_and_after_a_transposition_in_place(grad: bool) -> None:
    def before_and_after(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tripled = torch.mul(x, 3)
        before = tripled.unsqueeze(0)
        tripled.t_()
        return before, tripled, tripled.unsqueeze(0)

    verify(before_and_after, p.leaves(1, 2, 4, grad=grad))


# -- a detached and an attached alias, through Dynamo ----------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.differs_from_peer("the detached view is not transposed: wrong values if square, else an error")
@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_detached_and_attached_view_of_an_intermediate(columns: int, dynamic: bool) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        transposed = (x + 1).transpose(0, 1)
        return transposed.detach(), transposed

    def make() -> Tensor:
        x = torch.linspace(0, 1, 3 * columns).view(3, columns).requires_grad_()
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
        return x

    x, x_eager = make(), make()
    detached, attached = compile_with_dynamo(both)(x)
    expected = both(x_eager)
    torch.testing.assert_close((detached, attached), expected)
    assert (detached.requires_grad, attached.requires_grad) == (False, True)
    assert detached.data_ptr() == attached.data_ptr()
    assert attached._is_view()
    (detached * attached).sum().backward()
    (expected[0] * expected[1]).sum().backward()
    torch.testing.assert_close(x.grad, x_eager.grad)


# -- several views out of one call -----------------------------------------------------------------

REFUSED = "[Ss]uch functions do not allow the output views"


def rows(x: Tensor) -> list[Tensor]:
    return list(x.unbind(0))


def rows_and_whole(x: Tensor) -> tuple[Tensor, ...]:
    return *x.unbind(0), x.view(x.shape)


def rows_of_triple(x: Tensor) -> list[Tensor]:
    return list(torch.mul(x, 3).unbind(0))


def rows_and_triple(x: Tensor) -> tuple[Tensor, ...]:
    tripled = torch.mul(x, 3)
    return *tripled.unbind(0), tripled


def rows_and_view_of_triple(x: Tensor) -> tuple[Tensor, ...]:
    tripled = torch.mul(x, 3)
    return *tripled.unbind(0), tripled.view(tripled.shape)


def rows_and_triple_and_view(x: Tensor) -> tuple[Tensor, ...]:
    tripled = torch.mul(x, 3)
    return *tripled.unbind(0), tripled, tripled.view(tripled.shape)


def test_writing_into_a_row_of_an_input_is_refused(entry: Entry) -> None:
    out = entry(rows)(torch.ones(3, 3, requires_grad=True).clone())
    with pytest.raises(RuntimeError, match=REFUSED):
        out[0].mul_(2)


@pytest.mark.parametrize("through", ["input", "detached row"])
def test_history_of_a_row_is_lost_when_its_memory_is_written(entry: Entry, through: str) -> None:
    x = torch.ones(3, 3, requires_grad=True).clone()
    out = entry(rows)(x)
    (x if through == "input" else out[0].detach()).mul_(2)
    with pytest.raises(RuntimeError, match=REFUSED):
        _ = out[0].grad_fn


@pytest.mark.differs_from_peer("the writer is let, and no history is lost")
@pytest.mark.parametrize("fn", [rows_of_triple, rows_and_triple, rows_and_view_of_triple])
def test_writing_into_a_row_of_an_intermediate_is_refused(entry: Entry, fn: Callable[..., Any]) -> None:
    out = entry(fn)(torch.ones(3, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=REFUSED):
        out[0].mul_(2)


@GRAD
def test_rows_of_an_input(grad: bool) -> None:
    verify(rows, p.leaves(1, 3, 4, grad=grad), nonleaf=True)


@GRAD
def test_rows_of_an_input_and_a_view_of_it(grad: bool) -> None:
    verify(rows_and_whole, p.leaves(1, 3, 4, grad=grad), nonleaf=True)


ROWS_OF_AN_INTERMEDIATE = [rows_of_triple, rows_and_triple, rows_and_view_of_triple]


@grad_differs("autograd does not know that the rows are views, and lets one write into them")
@pytest.mark.parametrize("fn", ROWS_OF_AN_INTERMEDIATE)
def test_rows_of_an_intermediate(fn: Callable[..., Any], grad: bool) -> None:
    verify(fn, p.leaves(1, 3, 4, grad=grad))


@GRAD
def test_rows_of_an_intermediate_returned_itself_and_viewed(grad: bool) -> None:
    verify(rows_and_triple_and_view, p.leaves(1, 3, 4, grad=grad))


def test_gradient_of_rows(entry: Entry) -> None:
    for fn in (rows, rows_of_triple):
        x, x_eager = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
        sum(entry(fn)(x)).sum().backward()
        sum(fn(x_eager)).sum().backward()
        torch.testing.assert_close(x.grad, x_eager.grad)


def test_write_into_a_view_and_into_the_input_below_its_rows(entry: Entry) -> None:
    def run(fn: Callable[..., Any]) -> Tensor | None:
        root = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
        x = root.clone()
        out = fn(x)
        out[-1].mul_(2)
        x.view(-1).mul_(3)
        (root + out[-1]).sum().backward()
        return root.grad

    torch.testing.assert_close(run(entry(rows_and_whole)), run(rows_and_whole))


@pytest.mark.parametrize("fn", [rows_and_triple, rows_and_view_of_triple, rows_and_triple_and_view])
def test_write_into_what_is_no_row(fn: Callable[..., Any], entry: Entry) -> None:
    def run(fn: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        x = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
        out = fn(x)
        out[-1].mul_(2)
        (out[-1] if len(out) == 4 else out[-1] + out[-2]).sum().backward()
        return out[-1].detach(), x.grad

    torch.testing.assert_close(run(entry(fn)), run(fn))

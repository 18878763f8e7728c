"""Inputs that a function changes: their data, their metadata, in autograd's sight or out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions

from . import programs as p
from .common import Inputs, verify

GRAD = pytest.mark.parametrize("grad", [True, False])
NONLEAF = pytest.mark.parametrize("nonleaf", [True, False])


@GRAD
def test_changed_input(grad: bool) -> None:
    verify(p.double_then_triple, p.leaves(1, 3, 3, grad=grad), nonleaf=True)


@pytest.mark.differs_from_peer("changes the leaf and goes on")
def test_leaf_that_requires_grad_is_refused_as_in_eager() -> None:
    verify(p.double_then_triple, p.leaves(1, 3, 3), nonleaf=False)


@GRAD
def test_changed_input_returned(grad: bool) -> None:
    verify(p.double_and_return, p.leaves(1, 3, 3, grad=grad), nonleaf=True)


@GRAD
def test_some_of_several_inputs_changed(grad: bool) -> None:
    verify(p.double_first_and_last, p.leaves(3, 3, 3, grad=grad), nonleaf=True)


def test_out_argument() -> None:
    verify(p.sine_into, p.leaves(2, 3, 3, grad=False), nonleaf=True)


@GRAD
def test_nothing_returned_and_a_strided_view_changed(grad: bool, entry: Callable[..., Any]) -> None:
    def increment(x: Tensor) -> tuple[()]:
        x.add_(1)
        return ()

    compiled = entry(increment)
    by_eager, by_us = (torch.arange(6.0, requires_grad=grad) + 0 for _ in range(2))
    assert tuple(increment(by_eager[0::2])) == tuple(compiled(by_us[0::2])) == ()
    torch.testing.assert_close(by_us, by_eager)
    assert by_us.requires_grad == by_eager.requires_grad


@GRAD
def test_strided_view_changed(grad: bool) -> None:
    def double_then_increment(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    def make() -> Inputs:
        root = torch.randn(3, 2, requires_grad=grad)
        whole = root.add(1)
        return Inputs([root, whole], [whole[:, 0]])

    verify(double_then_increment, make)


def test_alias_of_a_changed_input_gets_its_history(entry: Callable[..., Any]) -> None:
    def double(x: Tensor) -> Tensor:
        x.mul_(2)
        return (x + 1).detach()

    def run(fn: Callable[..., Any]) -> tuple[Tensor, Tensor, str, int]:
        root = torch.linspace(1, 2, 9).view(3, 3).requires_grad_()
        whole = root.clone()
        alias = whole.view(3, 3)
        out = fn(whole)
        assert not out.requires_grad
        history = alias.grad_fn
        assert history is not None
        (whole * alias).sum().backward()
        assert root.grad is not None
        return alias.detach(), root.grad, history.name(), alias._version

    found, expected = run(entry(double, keep_inference_input_mutations=True)), run(double)
    torch.testing.assert_close(found[:2], expected[:2])
    assert found[2:] == expected[2:]


@NONLEAF
def test_changed_through_detach(nonleaf: bool) -> None:
    def double_detached(x: Tensor) -> Tensor:
        x.detach().mul_(2)
        return x + 3

    verify(double_detached, p.leaves(1, 4), nonleaf=nonleaf)


@NONLEAF
def test_changed_through_a_view_without_grad(nonleaf: bool) -> None:
    verify(p.double_flat_unseen, p.leaves(1, 4), nonleaf=nonleaf)


@NONLEAF
def test_changed_without_grad(nonleaf: bool) -> None:
    verify(p.double_unseen, p.leaves(1, 4), nonleaf=nonleaf)


@NONLEAF
def test_changed_without_grad_and_nothing_with_grad_returned(nonleaf: bool) -> None:
    verify(p.double_and_add_unseen, p.leaves(1, 4), nonleaf=nonleaf, keep=(True,))


@pytest.mark.differs_from_peer("the changed input loses its history when the change is made after the graph")
def test_history_of_an_input_changed_without_grad() -> None:
    verify(p.double_and_add_unseen, p.leaves(1, 4), nonleaf=True, keep=(False,))


def test_changed_with_grad_without_and_detached() -> None:
    def three_ways(x: Tensor) -> Tensor:
        x.detach().mul_(2)
        x.mul_(3)
        with torch.no_grad():
            x.mul_(4)
        return x + 5

    verify(three_ways, p.leaves(1, 4), nonleaf=True)


@GRAD
def test_detached_alias_of_a_changed_input_returned(grad: bool) -> None:
    def double_beside_a_detached_alias(x: Tensor) -> tuple[Tensor, Tensor]:
        alias = x.detach()
        x.mul_(2)
        return x, alias

    verify(double_beside_a_detached_alias, p.leaves(1, 3, 3, grad=grad), nonleaf=True)


# -- metadata ------------------------------------------------------------------------------------


@GRAD
def test_transposed_input(grad: bool) -> None:
    def transpose_and_add(x: Tensor, y: Tensor) -> Tensor:
        x.transpose_(1, 0)
        return x + y

    verify(transpose_and_add, p.leaves(2, 3, 3, grad=grad), nonleaf=True)


@GRAD
def test_transposed_and_changed_input(grad: bool) -> None:
    def transpose_and_double(x: Tensor) -> Tensor:
        x.transpose_(1, 0)
        x.mul_(2)
        return x + 1

    verify(transpose_and_double, p.leaves(1, 2, 3, grad=grad), nonleaf=True)


@GRAD
def test_row_of_a_transposed_input_changed_and_a_view_returned(grad: bool) -> None:
    verify(p.transpose_then_scale_a_row, p.leaves(1, 3, 3, grad=grad), nonleaf=True)


@GRAD
def test_view_of_a_transposed_input(grad: bool) -> None:
    verify(p.transpose_one_view_both, p.leaves(2, 3, 3, grad=grad), nonleaf=True)


@pytest.mark.differs_from_peer("the input does not require grad afterwards")
def test_input_begins_to_require_grad() -> None:
    verify(
        p.begin_to_require_grad,
        lambda: [torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)],
        nonleaf=True,
    )


@GRAD
def test_one_of_two_aliases_changed_and_the_other_transposed(grad: bool) -> None:
    def double_one_transpose_other(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y.t_()
        return x.mul(y)

    def make() -> Inputs:
        root = torch.randn(2, 3, requires_grad=grad)
        whole = root.add(1)
        return Inputs([root], [whole[0], whole[0]])

    verify(double_one_transpose_other, make)


# -- batch norm ----------------------------------------------------------------------------------


@GRAD
def test_batch_norm_changes_its_statistics_and_saves_them(grad: bool) -> None:
    def normalize(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
        return torch._native_batch_norm_legit(x, weight, bias, mean, var, True, 0.5, 1e-5)

    def make() -> list[Tensor]:
        x = torch.randn(2, 5, 3, 3, requires_grad=grad)
        scale = [torch.randn(5, requires_grad=grad) for _ in range(2)]
        return [x, *scale, torch.randn(5), torch.rand(5)]

    aten = torch.ops.aten
    table = get_decompositions([aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward])
    verify(normalize, make, nonleaf=True, decompositions=table)

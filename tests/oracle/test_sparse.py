"""Sparse tensors: functionalization loses their transposition, so what uses them is left to eager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .common import assert_equal, leaf, leaves, same, strict, uncompiled

PLACES = torch.tensor([[0, 1, 2], [1, 2, 0]])
MATRIX = torch.sparse_coo_tensor(PLACES, torch.tensor([1.0, 2, 3]), (3, 3), check_invariants=True).coalesce()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # these are in beta state
    ROWS = MATRIX.to_sparse_csr()


def closed_over(x: Tensor) -> Tensor:
    return MATRIX @ x


def closed_over_by_rows(x: Tensor) -> Tensor:
    return ROWS @ x


def transposed(x: Tensor) -> Tensor:
    return torch.sparse.mm(MATRIX.t(), x.sin())


def made_inside(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.sparse_coo_tensor(PLACES, x[:, 0].detach(), (3, 3)), x)


def with_gradients(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(PLACES, x[:, 0], (3, 3)).to_dense() @ x


def converted(x: Tensor) -> Tensor:
    return torch.sparse.mm((x @ x.t()).to_sparse(), x)


@pytest.mark.parametrize(
    "fn", [closed_over, closed_over_by_rows, transposed, made_inside, with_gradients, converted]
)
def test_sparse_matrices(fn: Any) -> None:
    reason = "not a dense tensor" if "clos" in fn.__name__ or fn is transposed else "cannot follow"
    uncompiled(fn, lambda: leaves(leaf(3, 2)), reason, order=1 if fn is with_gradients else 2)


def test_a_sparse_gradient_is_compiled() -> None:
    def looked_up(w: Tensor) -> Tensor:
        return F.embedding(torch.tensor([0, 2]), w, sparse=True) * 2

    w = leaf(3, 2)
    wanted, found = (torch.autograd.grad(f(w).sum(), w)[0] for f in (looked_up, strict(looked_up)))
    assert found.is_sparse
    assert_equal(wanted, found)


def test_sparse_and_back_is_compiled() -> None:
    same(lambda x: x.sin().to_sparse().to_dense() * x, lambda: leaves(leaf(3, 2)), order=2)

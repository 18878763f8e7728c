"""Derivatives that torch computes in another way where it sees no plain tensors, as in a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .common import assert_equal, default, leaf, leaves, same, same_by_default, strict

COMPILERS = pytest.mark.parametrize("compiler", [strict, default])


def numbers(*values: float) -> Callable[[], Any]:
    return lambda: leaves(torch.tensor(values, dtype=torch.float64, requires_grad=True))


def matrix(rows: Any, dtype: torch.dtype = torch.float64) -> Callable[[], Any]:
    return lambda: leaves(torch.tensor(rows, dtype=dtype, requires_grad=True))


EYE = [[1.0, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("check", [same, same_by_default])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.max() - 3).sqrt(),
        lambda x: (1 - torch.min(x)).sqrt(),
        lambda x: (x.median() - 2).abs().sqrt(),
        lambda x: torch.nanmedian(x).log() * x.max(),
    ],
    ids=["max", "min", "median", "nanmedian"],
)
def test_an_infinite_gradient_is_that_of_the_selected_only(fn: Any, check: Any) -> None:
    check(fn, numbers(1, 3, 2, 3, 1), order=2)


def test_the_largest_of_numbers_that_are_none() -> None:
    same(lambda x: (x.max() ** 2, x.min()), numbers(1, float("nan"), 2), order=2)


@COMPILERS
def test_gradients_of_the_largest_are_contiguous(compiler: Any) -> None:
    x = leaf(3, 4, grad=False).t().requires_grad_()
    fn = lambda x: x.max() * 2  # noqa: E731
    (wanted,), (found,) = (torch.autograd.grad(f(x), x) for f in (fn, compiler(fn)))
    assert found.stride() == wanted.stride()
    assert_equal(found, wanted)


@pytest.mark.parametrize("check", [same, same_by_default])
@pytest.mark.parametrize(
    "fn", [torch.prod, lambda x: x[:, None].prod(1), lambda x: x[None].prod(0, keepdim=True)]
)
def test_products_of_one_number_have_a_second_derivative(fn: Any, check: Any) -> None:
    check(fn, numbers(2.0), order=3)


def test_products_along_the_last_dimension() -> None:
    same(lambda x: (x.topk(2).values.prod(-1), x.prod(-2)), matrix([[2.0, 3, 1], [4, 0, 0]]), order=2)


@pytest.mark.parametrize("check", [same, same_by_default])
@pytest.mark.parametrize(
    "make",
    [
        matrix(EYE),
        matrix([[0.0, 2, 0], [2, 0, 0], [0, 0, -2]]),
        matrix([EYE, [[1.0, 2, 3], [4, 5, 7], [1, 0, 1]]]),
        matrix([[[2.0]], [[3.0]]]),
        lambda: leaves(leaf(0, 2, 2)),
    ],
    ids=["identity", "rotation", "batch", "single", "none"],
)
def test_determinants_where_singular_values_are_equal(make: Any, check: Any) -> None:
    check(torch.linalg.det, make, order=3 if check is same else 2, write_after=False)


@pytest.mark.parametrize("rows", [[[1.0, 2], [2, 4]], [[1.0, 2, 3], [2, 4, 6], [1, 0, 1]]])
def test_determinants_of_singular_matrices(rows: Any) -> None:
    """Gradients; the strides are those of others. By hand: the second derivative is that of the minors."""

    def found(fn: Any) -> Any:
        x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(fn(x), x, create_graph=True)
        return g, torch.autograd.grad((g * g).sum() + g[0, 1], x)[0]

    torch.testing.assert_close(found(strict(torch.linalg.det)), found(torch.linalg.det), check_stride=False)


@pytest.mark.parametrize("check", [same, same_by_default])
def test_an_elastic_energy_at_rest(check: Any) -> None:
    def energy(u: Tensor) -> Tensor:
        f = torch.eye(3, dtype=u.dtype) + u
        volume = torch.linalg.det(f)
        return (f * f).sum() - 3 - 2 * volume.log() + volume.log() ** 2

    check(energy, matrix([[0.0] * 3] * 3), order=2, write_after=False)


@pytest.mark.parametrize("check", [same, same_by_default])
def test_derivatives_inside_the_function(check: Any) -> None:
    def stress(f: Tensor) -> Tensor:
        return torch.autograd.grad(torch.linalg.det(f).log() + f.max() ** 2, f, create_graph=True)[0]

    check(stress, matrix(EYE), order=2, write_after=False)


@COMPILERS
def test_square_matrices_of_changing_sizes(compiler: Any) -> None:
    """Two symbols that stand for the same number."""
    fast = compiler(torch.linalg.det)
    for n in (2, 3, 4, 5):
        results = []
        for fn in (torch.linalg.det, fast):
            x = leaf(n, n, seed=n, dtype=torch.float64)
            (g,) = torch.autograd.grad(fn(x), x, create_graph=True)
            results.append((g, torch.autograd.grad(g.sin().sum(), x)[0]))
        torch.testing.assert_close(*results)

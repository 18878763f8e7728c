"""Where fake tensors are not exact, the kernel decides: strides of unit dimensions, types of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.testing import Inputs
from aheadgrad.torchlayer import kernels
from aheadgrad.torchlayer.kernels import NotAsked, ask_kernel

from .common import assert_equal, default, leaf, leaves, same, strict


def ends_with_a_write(made: Tensor) -> Tensor:
    return made.mul_(2.0)


def wide(*shape: int) -> Tensor:
    """With a unit dimension at the end whose stride is not 1."""
    return leaf(*shape, grad=False)[:1].movedim(0, -1)


def strided(*shape: int) -> Tensor:
    return leaf(6, grad=False).as_strided(shape, (1, 3, 3))


STRIDES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "clamp": (lambda x: x.clamp(-0.5, 0.5), lambda: wide(2, 1, 3)),
    "rsub": (lambda x: 2 - x, lambda: leaf(1, 1, 3, grad=False)[1:]),
    "sort": (lambda x: x.sort(0).values, lambda: leaf(1, 4, grad=False).t()),
    "flip": (lambda x: x.flip(0), lambda: leaf(2, 2, 3, grad=False)[::2]),
    "random": (torch.rand_like, lambda: wide(2, 1, 3).transpose(0, -1)),
    "where": (lambda x: torch.where(x > 0, x, x.mean()), lambda: strided(3, 1, 2)),
}


@pytest.mark.parametrize("case", STRIDES)
def test_strides_of_unit_dimensions_outlive_a_write(case: str) -> None:
    make, given = STRIDES[case]
    same(lambda x: ends_with_a_write(make(x)), lambda: Inputs((given(),), {}, leaves=[]))


def test_they_do_so_with_symbolic_sizes() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x.mean()).mul_(2.0)

    compiled = strict(f)
    for n in (2, 3, 4):
        x = leaf(6 * n, grad=False).as_strided((3, 1, n), (1, 3, 3)).unsqueeze_(0)
        assert compiled(x).stride() == f(x).stride()


def _reduces_nothing(x: Tensor) -> Tensor:
    return x[x.shape[0] :].amax(0)


def _no_such_kernel(x: Tensor) -> Tensor:
    v = x.long().softmax(-1)
    return v.sigmoid_()


def _index_far_away(x: Tensor) -> Tensor:
    v = x[torch.tensor([9])]
    return v.expand(7, 8, 9)


def _selects_too_far(x: Tensor) -> Tensor:
    return x.select(0, 12)


def _slices_a_number(x: Tensor) -> Tensor:
    return x.sum()[1:]


def _copies_other_dimensions(x: Tensor) -> Tensor:
    return x.clone().index_copy_(0, torch.tensor([0]), x[None])


def _shapes_of_no_polar(x: Tensor) -> Tensor:
    return torch.complex(x.long(), x.long())


WRONG = [
    _reduces_nothing,
    _no_such_kernel,
    _index_far_away,
    _selects_too_far,
    _slices_a_number,
    _copies_other_dimensions,
    _shapes_of_no_polar,
]


@pytest.mark.parametrize("f", WRONG)
@pytest.mark.parametrize("dynamic", [None, True])
def test_errors_are_of_the_kernels_type(f: Any, dynamic: bool | None) -> None:
    x = leaf(3, grad=False)
    with pytest.raises(Exception) as eager:
        f(x)
    with pytest.raises(Exception) as compiled:
        aheadgrad.compile(f, fallback="error", dynamic=dynamic, frontend="trace")(x)
    assert compiled.type is eager.type
    assert str(compiled.value).splitlines()[0] == str(eager.value).splitlines()[0]


def test_an_overlap_is_refused_before_what_else_is_wrong() -> None:
    def f(b: Tensor, c: Tensor) -> Tensor:
        return b.index_copy_(0, torch.tensor([0]), c.unsqueeze(0))

    x = torch.ones(3)
    for args in ((x, x), (x, x.view_as(x))):
        with pytest.raises(RuntimeError, match="single memory location"):
            f(*args)
        with pytest.raises(RuntimeError, match="single memory location"):
            strict(f)(*args)


def test_asking_leaves_the_random_state_alone() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.rand_like(x)

    torch.manual_seed(0)
    expected = f(torch.ones(1, 3))
    torch.manual_seed(0)
    assert torch.equal(strict(f)(torch.ones(1, 3)), expected)


def test_large_tensors_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(func: Any, args: Any, kwargs: Any) -> Any:
        try:
            out = ask_kernel(func, args, kwargs)
        except NotAsked:
            asked.append(None)
            raise
        asked.append(out)
        return out

    monkeypatch.setattr("aheadgrad.torchlayer.opcache.ask_kernel", note)
    strict(lambda x: x * 2)(torch.ones(1, 4))
    assert asked.pop().shape == (1, 4)
    strict(lambda x: x * 2)(torch.ones(1, kernels._MOST_ELEMENTS + 1))
    assert asked == [None]
    strict(lambda x: x.repeat(1, kernels._LARGEST_RESULT))(torch.ones(1, 4))
    assert asked == [None]


def test_filled_with_a_number_of_its_own() -> None:
    same(lambda x: x.fill_(x[0]), lambda: leaves(leaf(3, grad=False)))


@pytest.mark.parametrize("compiler", [strict, default])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 3000])
def test_statistics_of_half_precision_are_of_the_weights_precision(
    compiler: Any, dtype: torch.dtype, rows: int
) -> None:
    """References say half precision; the second derivative has to round as the kernel does."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (4,), w, torch.zeros(4))

    results = []
    for fn in (norm, compiler(norm)):
        x, w = leaf(rows, 4, dtype=dtype), leaf(4, seed=1)
        (g,) = torch.autograd.grad(fn(x, w).sin().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(g.float().pow(2).sum(), [x, w]))
    for a, b in zip(*results, strict=True):
        assert_equal(a, b)

"""Entries with symbolic sizes, against eager: what they assume, and what the user's Python sees of them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aheadgrad
from aheadgrad.errors import DataDependentError
from tests.oracle.common import assert_equal, leaf, step, strict

SIZES = (8, 5, 7, 8, 3)
either = pytest.mark.parametrize("dynamic", [None, True])


def same_for_sizes(
    fn: Callable[..., Any],
    dynamic: bool | None,
    make: Callable[[int], Any] = lambda n: (leaf(n, 4),),
    **options: Any,
) -> Any:
    """Results, their types and gradients for several sizes in a row; nothing runs uncompiled by default."""
    compiled = aheadgrad.compile(
        fn, **{"dynamic": dynamic, "max_entries": 16, "fallback": "error", **options}, frontend="trace"
    )
    for n in SIZES:
        expected, found = make(n), make(n)
        left, right = step(fn, *expected), step(compiled, *found)
        assert_equal(left, right, f"size {n}")
        assert [type(v) for v in left] == [type(v) for v in right], n
        for a, b in zip(expected, found, strict=True):
            if isinstance(a, Tensor):
                assert_equal(a.grad, b.grad, f"gradients, size {n}")
    return compiled


# -- what an entry assumes


@either
def test_an_assumption_with_or_leaves_the_others_in_force(dynamic: bool | None) -> None:
    """`unflatten` assumes one thing or another of a size; other sizes must still be as assumed."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.unflatten(0, (2, -1)).sum(1), y.sum() / y.shape[0]

    compiled = strict(fn, dynamic=dynamic)
    for a, b in ((8, 8), (4, 4), (4, 6), (6, 4)):
        x, y = torch.ones(a, 3), torch.ones(b)
        assert_equal(fn(x, y), compiled(x, y), f"{a}, {b}")


def test_a_decision_with_or_leaves_the_others_in_force() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 + x.shape[1] if (x.shape[0] == 2) | (x.shape[0] % 2 == 0) else x * 3

    compiled = strict(fn, dynamic=True)
    for shape in ((4, 4), (6, 4), (6, 6), (5, 4), (2, 4)):
        assert_equal(fn(torch.ones(shape)), compiled(torch.ones(shape)), str(shape))


# -- numbers computed from sizes

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "root": lambda x: x.shape[0] ** 0.5,
    "product": lambda x: x.shape[0] * 0.1,
    "sum": lambda x: x.shape[0] + 0.5,
    "quotients": lambda x: (x.shape[0] / 3, x.shape[0] // 3, x.shape[0] % 3, x.shape[0] // 2.0),
    "rounded": lambda x: (round(x.shape[0] / 3), math.floor(x.shape[0] / 3), math.ceil(x.shape[0] / 3)),
    "int of a float": lambda x: x.new_zeros(int(x.shape[0] * 1.5)),
    "divmod": lambda x: divmod(x.shape[0], 3),
    "bytes": lambda x: x.nbytes,
    "power": lambda x: (x**2).sum(0) ** x.shape[0],
    "base of a power": lambda x: x.shape[0] ** x,
    "key": lambda x: {x.shape[0]: 1},
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=1.5),
    "histogram": lambda x: torch.histogram(x.detach(), 4)[0],
    "sparse": lambda x: x.to_sparse().to_dense() * 2,
}


@either
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_computed_from_sizes(name: str, dynamic: bool | None) -> None:
    same_for_sizes(NUMBERS[name], dynamic)


@either
def test_a_derivative_that_needs_numbers(dynamic: bool | None) -> None:
    same_for_sizes(
        lambda t: F.affine_grid(t, [t.shape[0], 2, 3, 4], align_corners=False),
        dynamic,
        lambda n: (leaf(n, 2, 3),),
    )


@either
def test_grad_mode_decided_by_a_size(dynamic: bool | None) -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(x.shape[0] > 5):
            y = x * 2
        return y + x

    same_for_sizes(fn, dynamic)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, to a size": lambda x: F.interpolate(
        x, (x.shape[2] * 2, 9), mode="bilinear", align_corners=True
    ),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "linear": lambda x: F.interpolate(x[0], scale_factor=2.3, mode="linear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "softshrink": F.softshrink,
}


@pytest.mark.parametrize("name", KERNELS)
def test_ops_with_kernels_are_not_taken_apart(name: str) -> None:
    """Torch's Python versions of these round and lay out otherwise."""
    fn = KERNELS[name]
    same_for_sizes(fn, True, lambda n: (leaf(1, 3, n, 6),))
    compiled = same_for_sizes(fn, True, lambda n: (leaf(1, 3, n, 6, grad=False),))
    assert len(compiled.entries) == 1
    x = torch.randn(3, 1, 5, 6).transpose(0, 1)
    assert compiled(x).stride() == fn(x).stride()


# -- what the function's Python sees of a size


class Holder:
    """An object that pytree does not know; equal by what it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return type(other) is Holder and type(other.held) is type(self.held) and other.held == self.held

    __hash__ = None  # type: ignore[assignment]


def raised(x: Tensor) -> Any:
    try:
        raise ValueError(x.shape[0])
    except ValueError as error:
        return Holder(error.args)


def matched(n: Any) -> str:
    match n:
        case int():
            return "int"
        case _:
            return "something else"


SEEN: dict[str, Callable[[Tensor], Any]] = {
    "text": lambda x: (
        str(x.shape[0]),
        f"{x.shape[0]}",
        f"{x.shape[0]:>4d}",
        repr([x.numel()]),
        str(x.shape),
    ),
    "text of a float": lambda x: str(x.shape[0] / 2),
    "looked up": lambda x: x * {"8": 1.0, "5": 2.0}.get(str(x.shape[0]), 3.0),
    "isinstance": lambda x: x * 2 if isinstance(x.shape[0], int) else x * 3,
    "isinstance of others": lambda x: (
        isinstance(x.shape[0] / 2, float),
        isinstance(x.shape[0] > 2, bool),
        isinstance(x.shape[0] * 2, numbers.Integral),
        isinstance(x.shape[0], str),
        x.shape[0].__class__ is int,
    ),
    "match": lambda x: matched(x.shape[0]),
    "truth": lambda x: (x.shape[0] > 5) is True,
    "slice": lambda x: slice(0, x.shape[0]),
    "steps of floats": lambda x: (
        x.shape[0] * 0.1 * 3,
        x.shape[0] + 0.1 + 0.2,
        x * (x.shape[0] * 0.1 + x.shape[0]),
    ),
}


SEEN_IN_OBJECTS: dict[str, Callable[[Tensor], Any]] = {
    "object": lambda x: Holder(x.shape[0]),
    "object inside": lambda x: Holder({"sizes": [x.shape[0]]}),
    "exception": raised,
}


@either
@pytest.mark.parametrize("name", SEEN)
def test_sizes_look_like_numbers(name: str, dynamic: bool | None) -> None:
    same_for_sizes(SEEN[name], dynamic)


@either
@pytest.mark.parametrize("name", SEEN_IN_OBJECTS)
@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
def test_sizes_in_objects_that_are_returned(name: str, dynamic: bool | None) -> None:
    same_for_sizes(SEEN_IN_OBJECTS[name], dynamic, fallback="warn")


class Scaled(torch.autograd.Function):
    """Its backward looks at a size as it would at a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        scale = {"8": 1.0, "5": 2.0}.get(str(g.shape[0]), 3.0)
        return g * scale if isinstance(g.shape[1], int) else g * 17


@either
def test_sizes_look_like_numbers_in_a_backward(dynamic: bool | None) -> None:
    same_for_sizes(lambda x: Scaled.apply(x), dynamic)


@either
@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
def test_a_size_in_a_closure(dynamic: bool | None) -> None:
    def fn(x: Tensor) -> Callable[[], Any]:
        n = x.shape[0]
        return lambda: n

    compiled = aheadgrad.compile(fn, dynamic=dynamic, frontend="trace")
    for n in SIZES:
        found = compiled(torch.ones(n, 4))()
        assert (found, type(found)) == (n, int)


@either
@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
def test_a_size_left_in_a_module(dynamic: bool | None) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = Holder([x.shape[0]])
            return x * 2

    net = Net()
    compiled = aheadgrad.compile(net, dynamic=dynamic, frontend="trace")
    for n in (8, 5, 7):
        assert_equal(compiled(torch.ones(n, 4)), torch.full((n, 4), 2.0))
        assert net.last.held == [n]
        assert [type(v) for v in net.last.held] == [int]


def test_sizes_are_still_symbols_where_they_are_only_asked_for_their_type() -> None:
    def fn(x: Tensor) -> Tensor:
        assert isinstance(x.shape[0], int)
        return x * x.shape[0] * (x.shape[0] / 7)

    assert len(same_for_sizes(fn, True).entries) == 1


def test_python_versions_of_ops_are_there_afterwards() -> None:
    ops = [torch.ops.aten.upsample_bilinear2d.vec, torch.ops.aten.softshrink.default]
    before = [dict(op.py_kernels) for op in ops]
    strict(lambda x: x * 2, dynamic=True)(torch.ones(5, 4))
    assert before == [dict(op.py_kernels) for op in ops]


def test_symbolic_numbers_are_as_before_afterwards() -> None:
    before = {cls: dict(vars(cls)) for cls in (torch.SymInt, torch.SymFloat, torch.SymBool)}
    strict(lambda x: x * x.shape[0], dynamic=True)(torch.ones(5, 4))
    assert before == {cls: dict(vars(cls)) for cls in before}


# -- errors

DATA_DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "loop over a mask": lambda x: list(x[x[:, 0] > 0]),
    "number of a mask": lambda x: int(x[x > 0].shape[0]),
    "item": lambda x: x.sum().item() + 1 > 0 or 3,
    "index": lambda x: x[x[0, 0].long().item()],  # type: ignore[index]
    "count": lambda x: len(x.nonzero()),
    "text of an item": lambda x: str(x.sum().item()),
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_decisions_on_values_say_so(name: str, dynamic: bool | None) -> None:
    compiled = strict(DATA_DEPENDENT[name], dynamic=dynamic)
    for n in (8, 5):
        with pytest.raises(DataDependentError):
            compiled(torch.ones(n, 4))


ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "sizes do not match": lambda x: x + torch.ones(17, 4),
    "no such view": lambda x: x.view(17, 3),
    "no such dimension": lambda x: x.sum(4),
    "index out of range": lambda x: x[20],
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_eager(name: str, dynamic: bool | None) -> None:
    fn = ERRORS[name]
    compiled = strict(fn, dynamic=dynamic)
    for n in (8, 5):
        with pytest.raises((RuntimeError, IndexError)) as expected:
            fn(torch.ones(n, 4))
        with pytest.raises(type(expected.value)) as found:
            compiled(torch.ones(n, 4))
        assert type(found.value) is type(expected.value)


# -- no elements, and more of them

EMPTY: dict[str, Callable[[], Tensor]] = {
    "sliced": lambda: torch.randn(0, 6)[:, 1:4],
    "rows": lambda: torch.randn(0, 6)[:, ::2],
    "stride 0": lambda: torch.randn(3, 0).t() * 1,
    "expanded": lambda: torch.randn(0, 1).expand(0, 3),
    "columns": lambda: torch.randn(6, 0).t(),
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_inputs_of_any_layout(name: str, dynamic: bool | None) -> None:
    for fn in (lambda x: x * 2, lambda x: x.mul_(2), lambda x: x.add_(1)[1:]):
        compiled = strict(fn, dynamic=dynamic)
        expected, found = fn(EMPTY[name]()), compiled(EMPTY[name]())
        assert (expected.shape, expected.stride()) == (found.shape, found.stride())


def test_dropout_of_nothing_is_the_input_itself() -> None:
    x = torch.randn(0, 4, requires_grad=True)
    assert F.dropout(x, 0.5) is x
    compiled = strict(lambda x: F.dropout(x, 0.5), dynamic=True)
    assert compiled(x) is x


RESIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x.resize_(16, 4),
    "a view": lambda x: x[1:].resize_(16, 4),
    "an input, like another": lambda x: x.resize_as_(torch.ones(16, 4)),
}


@pytest.mark.parametrize("name", RESIZES)
def test_resized_to_more_elements(name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return RESIZES[name](x).fill_(2)

    compiled = aheadgrad.compile(fn, frontend="trace")
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="hold more elements"):
        assert_equal(fn(x), compiled(y))
    assert x.shape == y.shape

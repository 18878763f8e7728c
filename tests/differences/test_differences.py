"""Every listed difference from eager (docs/differences.md), so that the list stays true."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.errors import DataDependentError, FallbackError, FallbackWarning
from aheadgrad.torchlayer.two_tensor import TwoTensor


def hooked_inside(x: Tensor) -> Any:
    h = x.sin()
    h.register_hook(lambda g: g * 2)
    return h, h.exp()


def test_gradient_of_an_input_of_which_only_the_shape_changes() -> None:
    def fn(x: Tensor) -> Tensor:
        x.unsqueeze_(0)
        return x.exp()

    def found(fn: Callable[..., Any]) -> Any:
        x = torch.ones(3, requires_grad=True) * 1
        return torch.autograd.grad(fn(x).sum(), x, allow_unused=True)[0]

    assert found(fn) is not None
    assert found(aheadgrad.compile(fn, fallback="error", frontend="trace")) is None


@pytest.mark.parametrize("fn", [hooked_inside])
def test_gradient_of_some_returned_intermediates_is_refused(fn: Callable[..., Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    *_, h, out = fn(x)
    torch.autograd.grad(out.sum(), h)
    *_, h, out = aheadgrad.compile(fn, fallback="error", frontend="trace")(x)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(out.sum(), h)


def test_second_derivatives_of_conjugates_inside_subclasses_are_refused() -> None:
    def second(fn: Callable[..., Any]) -> Any:
        x = TwoTensor(torch.ones(3), torch.full((3,), 2.0)).requires_grad_()
        (g,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)[0]

    def fn(x: Tensor) -> Tensor:
        return torch.complex(x, x * 2).abs()

    assert bool((second(fn).a != 0).any())  # eager forgets to conjugate: this derivative is zero
    with pytest.raises(FallbackError, match="conjugated"):
        second(aheadgrad.compile(fn, fallback="error", frontend="trace"))


def test_decisions_on_values_are_refused_and_name_the_line() -> None:
    def fn(x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that is named
            return x
        return -x

    with pytest.raises(DataDependentError, match=r"test_differences\.py"):
        aheadgrad.compile(fn, frontend="trace", fallback="error")(torch.ones(2))
    with pytest.warns(FallbackWarning, match=r'frontend="dynamo".*test_differences\.py'):
        aheadgrad.compile(fn, frontend="trace")(torch.ones(2))


def test_a_changed_tensor_is_refused_even_if_another_output_needs_it() -> None:
    def fn(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        return h * v, h * w

    def run(fn: Callable[..., Any]) -> None:
        v, w = torch.ones(3), torch.ones(3)
        out, _ = fn(torch.ones(3, requires_grad=True), v, w)
        w.mul_(2)  # saved for the other output, which is not differentiated
        out.sum().backward()

    run(fn)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(aheadgrad.compile(fn, frontend="trace"))


def test_eager_does_not_know_what_a_changed_view_from_no_grad_is() -> None:
    """There is nothing to agree with: it depends on the formula, and on how gradients are asked for."""
    ops = (torch.cos, torch.exp, torch.square)

    def outcome(op: Callable[..., Any], back: Callable[..., Any]) -> str:
        x = torch.ones(3, requires_grad=True)
        base = x * 1
        with torch.no_grad():
            view = base.view(3)
        out = op(view)
        base.mul_(2)
        try:
            back((out + base).sum(), x)
        except RuntimeError as error:
            return str(error)[:38]
        return "returns"

    raises = "A view was created in no_grad mode and"
    assert [outcome(op, lambda out, x: out.backward()) for op in ops] == [raises, "returns", raises]
    assert {outcome(op, torch.autograd.grad) for op in ops} == {"returns"}


def test_an_input_that_is_cut_off_before_backward() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * x

    def run(fn: Callable[..., Any]) -> None:
        x = torch.ones(3, requires_grad=True) * 1
        out = fn(x)
        x.detach_()
        out.sum().backward()

    run(aheadgrad.compile(fn, fallback="error", frontend="trace"))
    with pytest.raises(RuntimeError, match="detached in-place"):
        run(fn)


def expanded_write(x: Tensor) -> Tensor:
    x.expand(3).fill_(1.0)
    return x


def unfold_write(x: Tensor) -> Tensor:
    x.unfold(0, 2, 1).zero_()
    return x


def strided_view_of_a_view(x: Tensor) -> Tensor:
    x.detach().as_strided((2,), (2,)).add_(1)
    return x


def shrunk_with_views(x: Tensor) -> Tensor:
    h = x * 2
    view = h[:]
    h.as_strided_((1,), (1,))
    return view


def changed_and_shrunk(x: Tensor) -> Tensor:
    x.add_(1)
    x.as_strided_((2,), (1,))
    return x


def old_memory(x: Tensor) -> Tensor:
    before = x.view(-1)
    x.set_(torch.ones(4))
    before.mul_(2)
    return x


def unordered_overlap(x: Tensor) -> Tensor:
    grid = x.view(2, 2)
    grid[:, 0].add_(grid[0])
    return x


@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (expanded_write, (1,)),
        (unfold_write, (4,)),
        (strided_view_of_a_view, (4,)),
        (shrunk_with_views, (4,)),
        (changed_and_shrunk, (4,)),
        (old_memory, (4,)),
        (unordered_overlap, (4,)),
    ],
)
def test_what_cannot_be_recorded_runs_uncompiled(fn: Callable[..., Any], size: tuple[int, ...]) -> None:
    with pytest.raises(FallbackError):
        aheadgrad.compile(fn, fallback="error", frontend="trace")(torch.ones(size))
    compiled = aheadgrad.compile(fn, frontend="trace")
    ours, eagers = torch.arange(1.0, size[0] + 1), torch.arange(1.0, size[0] + 1)
    with pytest.warns(FallbackWarning, match="uncompiled"):
        out = compiled(ours)
    torch.testing.assert_close((out, ours), (fn(eagers), eagers))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.ones(size))  # told once
    assert list(compiled.fallbacks.values()) == [2]


def test_a_stale_view_is_written_to_uncompiled() -> None:
    """Eager records the write with the base's new shape, whatever the view knows."""

    def f(a: Tensor) -> Tensor:
        base = a.cos()
        view = base.permute((0, 1))
        with torch.no_grad():
            base.t_()
        part = view[:, ::2]
        part += part
        return base

    x = torch.randn(3, 3, requires_grad=True)
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="changes its shape under no_grad"):
        out = aheadgrad.compile(f, frontend="trace")(x)
    weights = torch.randn(3, 3)
    (found,) = torch.autograd.grad((out * weights).sum(), x)
    (expected,) = torch.autograd.grad((f(x) * weights).sum(), x)
    assert torch.equal(found, expected)


def test_gradients_do_not_depend_on_the_output_that_their_formula_reuses() -> None:
    def found(fn: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
        x, seen = torch.ones(3, requires_grad=True), list[Tensor]()
        y = fn(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        y.register_hook(seen.append)
        (second,) = torch.autograd.grad(g.sum(), x, retain_graph=True)
        torch.testing.assert_close(second, -2 * x.tanh() * (1 - x.tanh() ** 2))
        return torch.autograd.grad(g.sum(), y, allow_unused=True)[0], seen

    of_output, seen = found(torch.tanh)
    assert of_output is not None
    assert seen
    of_output, seen = found(aheadgrad.compile(torch.tanh, fallback="error", frontend="trace"))
    assert of_output is None
    assert not seen


def test_a_nan_of_infinite_gradients_in_anomaly_mode() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x - x).sqrt() * x

    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore", UserWarning)
        assert torch.autograd.grad(fn(x).sum(), x)[0].isnan().all()
        with pytest.raises(RuntimeError, match="SubBackward0"):
            torch.autograd.grad(aheadgrad.compile(fn, frontend="trace")(x).sum(), x)


def test_the_phase_of_eigenvectors() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.linalg.eigh(x @ x.mH)[1].real.sin()

    x = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with pytest.raises(RuntimeError, match="ill-defined"):
        fn(x).sum().backward()
    aheadgrad.compile(fn, fallback="error", frontend="trace")(x).sum().backward()
    assert x.grad is not None

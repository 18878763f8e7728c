"""Grad mode, autocast, inference mode: inside, outside, and after errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.testing import Inputs, assert_same

from .common import assert_equal, leaf, one, same, strict, two


def bf16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def mm(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin() @ w


def test_autocast_outside() -> None:
    assert_same(mm, strict(mm), two(3, 3), around=bf16)


def test_autocast_inside() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        with bf16():
            a = x @ w
        return a, x @ w

    same(fn, two(3, 3))


def test_autocast_switched_off_inside() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        a = x @ w
        with bf16(enabled=False):
            return a, x @ w

    assert_same(fn, strict(fn), two(3, 3), around=bf16)


def test_autocast_asked_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if torch.is_autocast_enabled("cpu") else x * 3

    compiled = strict(fn)
    x = leaf(3)
    assert torch.equal(compiled(x), x * 3)
    with bf16():
        assert torch.equal(compiled(x), x * 2)
    assert torch.equal(compiled(x), x * 3)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_backward_inside_and_outside_autocast(forward: bool, backward: bool) -> None:
    compiled = strict(mm)
    for _ in range(2):
        results = []
        for run in (mm, compiled):
            x, w = leaf(3, 3), leaf(3, 3, seed=1)
            with bf16(forward):
                out = run(x, w).float().sum()
            with bf16(backward):
                out.backward()
            results.append((out, x.grad, w.grad))
        assert_equal(results[0], results[1])


def test_autocast_of_a_module_reuses_casts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    compiled = strict(model)
    x = leaf(2, 4)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        with bf16():
            out = run(run(x))
        out.float().sum().backward()
        results.append([out, *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
    assert_equal(results[0], results[1])


def test_custom_function_with_its_own_autocast() -> None:
    class Matmul(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: Tensor) -> Any:
            a, b = ctx.saved_tensors
            return g @ b.t(), a.t() @ g

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return Matmul.apply(x, w) * 2  # type: ignore[no-any-return]

    assert_same(fn, strict(fn), two(3, 3), around=bf16)
    assert_same(fn, strict(fn), two(3, 3))


# grad mode


@pytest.mark.parametrize("mode", [True, False])
def test_grad_mode_changed_inside_stays_changed(mode: bool) -> None:
    def fn(x: Tensor) -> Any:
        a = x * 2
        torch.set_grad_enabled(mode)
        return a, x * 3

    for around in (torch.enable_grad, torch.no_grad):
        compiled = strict(fn)
        for _ in range(2):
            with around():
                compiled(leaf(3))
                assert torch.is_grad_enabled() is mode
        assert_same(fn, compiled, one(3), around=around)


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_modes_inside_modes(around: Callable[[], Any], inside: Callable[[], Any]) -> None:
    def fn(x: Tensor) -> Any:
        a = x * 2
        with inside():
            b = a * 3
        return a, b, a * 4

    compiled = strict(fn)
    for _ in range(2):
        x, y = leaf(3), leaf(3)
        with around():
            expected, found = fn(x), compiled(y)
        assert_equal(expected, found)
        for e, f in zip(expected, found, strict=True):
            assert e.requires_grad == f.requires_grad
            assert e.is_inference() == f.is_inference()


def test_no_grad_as_a_decorator_inside() -> None:
    @torch.no_grad()
    def scale(x: Tensor) -> Tensor:
        return x.norm()

    same(lambda x: x / scale(x), one(3))


def test_compiled_function_under_a_no_grad_decorator() -> None:
    run = torch.no_grad()(strict(lambda x: x * 2))
    assert not run(leaf(3)).requires_grad


def test_mutation_under_inference_mode() -> None:
    compiled = strict(lambda x: x.add_(1))
    x = torch.zeros(3)
    with torch.inference_mode():
        y = torch.zeros(3)
        for _ in range(2):
            assert compiled(y) is y
            assert compiled(x) is x
    assert torch.equal(x, torch.full((3,), 2.0))
    assert torch.equal(y, torch.full((3,), 2.0))


def test_default_dtype_inside() -> None:
    def fn(x: Tensor) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            made = torch.ones(3)
        finally:
            torch.set_default_dtype(before)
        return x * made, torch.zeros(2)

    same(fn, one(3))


def test_anomaly_mode_and_warnings_state_afterwards() -> None:
    compiled = strict(lambda x: x * 2)
    with torch.autograd.detect_anomaly(check_nan=False) if False else torch.enable_grad():
        compiled(leaf(3))
    assert not torch.is_anomaly_enabled()


# after errors


class Custom(Exception):
    pass


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, bf16])
def test_state_after_an_error_inside(around: Callable[[], Any]) -> None:
    def fn(x: Tensor) -> Tensor:
        torch.rand(3)
        torch.set_grad_enabled(not torch.is_grad_enabled())
        raise Custom("mine")

    compiled = strict(fn)
    torch.manual_seed(3)
    with around():
        before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        with pytest.raises(Custom, match="mine"):
            compiled(leaf(3))
        after = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        torch.set_grad_enabled(before[0])
    assert after == before
    torch.rand(1)
    aheadgrad.compile(lambda x: x * 2, fallback="error", frontend="trace")(leaf(3))


def test_random_state_after_an_error_is_as_before() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + torch.rand(3)
        if y.sum() > 0:
            return y
        return y * 2

    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(aheadgrad.errors.CaptureError):
        strict(fn)(leaf(3))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_state_after_an_error_at_run_time() -> None:
    """An error that only the values cause."""

    def fn(x: Tensor, i: Tensor) -> Tensor:
        return x[i] * 2

    compiled = strict(fn)
    x = leaf(3)
    compiled(x, torch.tensor([0]))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([7]))
    assert torch.is_grad_enabled()
    with bf16(), pytest.raises(IndexError):
        compiled(x, torch.tensor([7]))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(compiled(x, torch.tensor([1])), x[1:2] * 2)


def test_inputs_of_a_call_in_inference_mode_keep_working_outside() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    compiled = strict(model)
    with torch.inference_mode():
        compiled(leaf(4, 3, grad=False))
    compiled(leaf(4, 3)).sum().backward()
    assert model[0].weight.grad is not None


def test_the_oracle_under_inference_mode() -> None:
    def make() -> Inputs:
        return Inputs((torch.arange(4.0),))

    def fn(x: Tensor) -> Any:
        return x * 2, x.view(2, 2), x.add_(1)

    assert_same(fn, strict(fn), make, around=torch.inference_mode)


def test_default_device_context() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.device("meta"):
            made = torch.ones(3)
        return x * made.shape[0]

    same(fn, one(3))


def test_a_device_context_around() -> None:
    compiled = strict(lambda: torch.ones(3) * 2)
    assert compiled().device.type == "cpu"
    with torch.device("meta"):
        assert compiled().device.type == "meta"
    assert compiled().device.type == "cpu"


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change_in_inference_mode(dynamic: bool | None) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin().sum(0)

    compiled = strict(fn, dynamic=dynamic)
    for n in (8, 5, 1, 0, 7):
        x = leaf(n, 2, grad=False)
        with torch.inference_mode():
            assert_equal(compiled(x), fn(x))
            torch.ones(1) * 2  # torch itself is as it was
    assert_equal(compiled(leaf(3, 2)), fn(leaf(3, 2)))


def test_grad_mode_switched_on_in_inference_mode() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = torch.maximum(x, x * 2)
        return y * y

    compiled = strict(fn)
    for _ in range(2):
        with torch.inference_mode():
            assert_equal(compiled(leaf(3)), fn(leaf(3)))

"""Python numbers that change from call to call (a temperature, a step): inputs after the first change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.oracle.common import assert_equal, leaf, strict

FLOATS = (0.1, 0.2, 0.30000000000000004, 1.5, -2.25, 7.0, 1e-3, 0.1)
INTS = (3, 4, 7, -2, 12, 5, 3)
ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308, 1.0, 1)

# one recording for all values
SMOOTH: dict[str, Callable[[Tensor, Any], Any]] = {
    "product": lambda x, t: x * t,
    "product from the left": lambda x, t: t * x + 1,
    "sum": lambda x, t: x + t,
    "difference": lambda x, t: t - x,
    "quotient": lambda x, t: (x / t).tanh(),
    "both ways": lambda x, t: t * x.sin() + (1 - t) * x.cos(),
    "softmax": lambda x, t: F.softmax(x / t, -1),
    "scaled": lambda x, t: torch.add(x, x.sin(), alpha=t),
    "twice": lambda x, t: (x * t).exp() * t,
    "halves": lambda x, t: x * (t / 2),
    "negative": lambda x, t: x * -t,
    "with an int": lambda x, t: x * (t * 3),
    "returned": lambda x, t: (x * t, t, -t),
    "full": lambda x, t: x * torch.full_like(x, t),
    "in place": lambda x, t: x.clone().mul_(t).add_(t),
    "written": lambda x, t: torch.where(x > 0, x, t),
    "half precision": lambda x, t: (x.half() * t).float(),
    "integers": lambda x, t: (x * 4).int() * t,
}
# where a value decides, or Python has to know it: as in eager, however many entries that takes
DECIDED: dict[str, Callable[[Tensor, Any], Any]] = {
    "blended": lambda x, t: x.lerp(x.sin(), t),
    "branch": lambda x, t: x * t if t > 0.15 else x - t,
    "equal": lambda x, t: x * 2 if t == 0.1 else x * t,
    "truth": lambda x, t: x * t if t else x,
    "text": lambda x, t: (x * t, f"{t:.3f}", str(t), repr(t)),
    "square": lambda x, t: x * (t * t),
    "cancelled": lambda x, t: x * (1 - (1 - t)),
    "times zero": lambda x, t: x + t * 0,
    "plus zero": lambda x, t: x.sign() / (t + 0.0),
    "rounding": lambda x, t: x * (t * 0.1 * 3),
    "power": lambda x, t: (x.abs() + 1) ** t,
    "exponential": lambda x, t: x * math.exp(-abs(t)),
    "rounded": lambda x, t: x * round(t, 1),
    "truncated": lambda x, t: x * int(t),
    "kind": lambda x, t: x * t if isinstance(t, float) else x,
    "largest": lambda x, t: x * max(t, 0.25),
    "clamped": lambda x, t: x.clamp(max=t),
    "dropout": lambda x, t: F.dropout(x, min(abs(t) % 1, 0.9)),
    "a tensor": lambda x, t: x * torch.tensor(t),
    "key": lambda x, t: x * {0.1: 2.0}.get(t, 3.0),
    "member": lambda x, t: x * 2 if t in (0.1, 7.0) else x * t,
    "float of it": lambda x, t: x * float(t),
    "quotients": lambda x, t: x * (7.5 // t + t % 2),
    "one over": lambda x, t: x * (1 / t),
    "norm": lambda x, t: x.norm(p=abs(t) + 1),
    "complex": lambda x, t: (x * complex(t, 1)).abs(),
    "bits": lambda x, t: x * t.hex().count("0"),
    "ratio": lambda x, t: x * t.as_integer_ratio()[1] if t == 0.5 else x,
}


def outcome(fn: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    torch.manual_seed(0)
    try:
        return fn(x, *args)
    except (ZeroDivisionError, OverflowError, ValueError, RuntimeError) as error:
        return type(error).__name__


def same_for(fn: Callable[..., Any], compiled: Any, t: Any) -> None:
    x, y = leaf(4, 3, dtype=torch.float64), leaf(4, 3, dtype=torch.float64)
    expected, found = outcome(fn, x, t), outcome(compiled, y, t)
    left, right = (v if isinstance(v, tuple) else (v,) for v in (expected, found))
    for a, b in zip(left, right, strict=True):
        assert type(a) is type(b), (t, a, b)
        assert_equal(a, b) if isinstance(a, Tensor) else _assert_same_number(a, b, t)
    if not isinstance(left[0], Tensor) or not left[0].requires_grad:
        return
    for given, out in ((x, left[0]), (y, right[0])):
        (g,) = torch.autograd.grad(out.pow(3).sum(), given, create_graph=True)
        (g.pow(2).sum() + out.sum()).backward()
    torch.testing.assert_close(y.grad, x.grad, equal_nan=True)


def _assert_same_number(a: Any, b: Any, t: Any) -> None:
    assert a == b or (a != a and b != b), (t, a, b)
    if isinstance(a, float):
        assert math.copysign(1, a) == math.copysign(1, b), (t, a, b)


@pytest.mark.parametrize("name", SMOOTH)
def test_a_float_that_changes_costs_one_more_entry(name: str) -> None:
    compiled = strict(SMOOTH[name])
    for t in FLOATS:
        same_for(SMOOTH[name], compiled, t)
    assert len(compiled.entries) == 2, compiled.misses


@pytest.mark.parametrize("name", [n for n in SMOOTH if n not in ("integers",)])
def test_an_int_that_changes_costs_few_entries(name: str) -> None:
    compiled = strict(SMOOTH[name])
    for t in INTS:
        same_for(SMOOTH[name], compiled, t)
    assert len(compiled.entries) <= 3, compiled.misses


@pytest.mark.parametrize("name", {**SMOOTH, **DECIDED})
def test_whatever_the_number_the_result_is_eagers(name: str) -> None:
    fn = {**SMOOTH, **DECIDED}[name]
    compiled = strict(fn, max_entries=64)
    for t in (*FLOATS, *ODD, 0.15, 0.25):
        if isinstance(t, float) or name not in ("bits", "ratio"):
            same_for(fn, compiled, t)


def test_a_decision_is_an_assumption_of_the_entry() -> None:
    compiled = strict(DECIDED["branch"])
    for t in (0.1, 0.2, 0.3, 0.05, 0.4, 0.12, 0.9, 0.01):
        same_for(DECIDED["branch"], compiled, t)
    assert len(compiled.entries) == 3


def test_numbers_inside_of_structures() -> None:
    def fn(x: Tensor, options: dict[str, Any], *rates: float, scale: float = 1.0) -> Tensor:
        return x * options["t"] * options["more"][0] + rates[0] * x.sin() * rates[1] * scale

    compiled = strict(fn)
    for k in range(1, 6):
        x, same = leaf(3), 0.5
        args: tuple[Any, ...] = (x, {"a": "text", "t": k / 7, "more": [0.5 * k, None]}, same, k / 3)
        assert_equal(fn(*args, scale=same), compiled(*args, scale=same), str(k))
    assert len(compiled.entries) == 2


def test_the_same_float_twice_and_only_one_changes() -> None:
    def fn(x: Tensor, a: float, b: float) -> Tensor:
        return x * a - b

    compiled = strict(fn)
    for a, b in ((0.5, 0.5), (0.7, 0.5), (0.5, 0.5), (0.9, 0.5), (0.9, 0.9), (0.9, 0.7)):
        assert_equal(fn(leaf(3), a, b), compiled(leaf(3), a, b), f"{a}, {b}")
    assert len(compiled.entries) == 3


def test_sizes_and_numbers_change_together() -> None:
    def fn(x: Tensor, t: float, step: int) -> Tensor:
        return (x[:, None].transpose(0, 1) * t).mean(1) / (step + x.shape[0])

    compiled = strict(fn)
    for n, t, step in ((4, 0.1, 1), (5, 0.2, 2), (7, 0.3, 3), (5, 0.1, 9), (9, 0.1, 40)):
        assert_equal(fn(leaf(n, 3), t, step), compiled(leaf(n, 3), t, step), str(n))
    assert len(compiled.entries) == 2


def test_dynamic_false_keeps_numbers() -> None:
    compiled = strict(SMOOTH["product"], dynamic=False)
    for t in (0.1, 0.2, 0.3):
        same_for(SMOOTH["product"], compiled, t)
    assert len(compiled.entries) == 3


def test_the_first_arguments_are_let_go() -> None:
    import gc
    import weakref

    compiled = strict(SMOOTH["product"])
    gone = []
    for t in (0.1, 0.2):
        x = leaf(3)
        gone.append(weakref.ref(x))
        compiled(x, t)
        del x
    gc.collect()
    assert all(ref() is None for ref in gone)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, weight: float, step: int) -> Tensor:
        h = self.inner(x)
        return F.softmax(h / weight, -1).square().sum() + weight * h.square().mean() + x.sum() * step


def test_annealed_training_through_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, other = Annealed().double(), Annealed().double()
    other.load_state_dict(eager.state_dict())
    count = CompileCounterWithBackend("aheadgrad")
    run = torch.compile(other, backend=count)
    for k in range(2, 12):
        losses = []
        for call, model in ((eager, eager), (run, other)):
            x = leaf(5, 3, seed=k, dtype=torch.float64)
            loss = call(x, 1 / k, k)
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            (g.square().sum() + loss).backward()
            losses += [loss.detach(), x.grad, model.inner.weight.grad.clone()]  # type: ignore[union-attr]
            model.zero_grad()
        torch.testing.assert_close(losses[3:], losses[:3])
    assert count.frame_count <= 2


@pytest.mark.parametrize("name", [n for n in SMOOTH if n not in ("returned",)])
def test_floats_through_dynamo(name: str) -> None:
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aheadgrad")
    compiled = torch.compile(SMOOTH[name], backend=count)
    for t in FLOATS:
        same_for(SMOOTH[name], compiled, t)
    assert count.frame_count <= 2


def test_a_function_that_asks_for_types_keeps_numbers() -> None:
    def fn(x: Tensor, t: float) -> Tensor:
        return x * t if type(t) is float else x

    compiled = strict(fn)
    for t in (0.1, 0.2, 0.3):
        same_for(fn, compiled, t)
    assert len(compiled.entries) == 3


def test_a_number_in_an_op_that_nobody_uses() -> None:
    def fn(x: Tensor, t: float) -> Tensor:
        (x @ x.t()) * t
        return x + t

    compiled = strict(fn)
    for t in (0.1, 0.2, 0.3):
        same_for(fn, compiled, t)
    assert len(compiled.entries) == 2

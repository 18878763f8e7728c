"""Errors that teach; and the caller's tensors as they were."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import (
    AheadgradError,
    CaptureError,
    DataDependentError,
    FallbackError,
    FallbackWarning,
    InvalidOption,
)

from .common import leaf, strict


def _if(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x * 2
    return x


def _item(x: Tensor) -> Tensor:
    n = x.sum().item()  # here
    return x * 2 if n > 0 else x


def _tolist(x: Tensor) -> Tensor:
    return x * sum(x.tolist())  # here


def _numpy(x: Tensor) -> Tensor:
    return x * float(x.detach().numpy().sum())  # here


def _array(x: Tensor) -> Tensor:
    import numpy as np

    return x * np.asarray(x.detach()).sum()  # here


def _int(x: Tensor) -> Tensor:
    return x * int(x[0])  # here


def _float(x: Tensor) -> Tensor:
    return x * float(x[0])  # here


def _bool(x: Tensor) -> Tensor:
    return x * bool(x[0])  # here


def _range(x: Tensor) -> Tensor:
    for _ in range(x.long().abs().max()):  # here
        x = x * 2
    return x


def _while(x: Tensor) -> Tensor:
    while x.norm() < 100:  # here
        x = x * 2
    return x


def _index(x: Tensor) -> Any:
    return [1, 2, 3][x[0].long()] * x  # here


def _contains(x: Tensor) -> Any:
    return x * 2 if 1.0 in x else x  # here


def _equal(x: Tensor) -> Any:
    return x * 2 if torch.equal(x, x * 2) else x  # here


def _allclose(x: Tensor) -> Any:
    return x * 2 if torch.allclose(x, x * 2) else x  # here


def _assert(x: Tensor) -> Tensor:
    assert x.sum() != 12345  # here
    return x


def _min(x: Tensor) -> Tensor:
    return min(x[0], x[1])  # here


def _nested(x: Tensor) -> Tensor:
    return _if(x * 2)


DATA_DEPENDENT = [
    _if, _item, _tolist, _numpy, _array, _int, _float, _bool, _range, _while,
    _index, _contains, _equal, _allclose, _assert, _min,
]  # fmt: skip


def _here(fn: Callable[..., Any]) -> int:
    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, line in enumerate(lines) if "# here" in line)


@pytest.mark.parametrize("fn", DATA_DEPENDENT)
def test_data_dependent_control_flow(fn: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentError) as caught:
        strict(fn)(leaf(3))
    text = str(caught.value)
    assert f"test_errors.py:{_here(fn)}" in text
    assert "torch.where" in text or "torch.cond" in text or "outside" in text  # what to do
    assert "value" in text


def test_the_line_of_a_nested_function() -> None:
    with pytest.raises(DataDependentError, match=f"test_errors.py:{_here(_if)}"):
        strict(_nested)(leaf(3))


def test_the_line_inside_a_module() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _if(x)

    with pytest.raises(DataDependentError, match=f"test_errors.py:{_here(_if)}"):
        strict(Branch())(leaf(3))


@pytest.mark.parametrize("fn", DATA_DEPENDENT)
def test_the_first_cause_is_kept_and_names_no_internals(fn: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError) as caught:
        strict(fn)(leaf(3))
    for word in ("FakeTensor", "FunctionalTensor", "SymBool", "proxy", "u0"):
        assert word not in str(caught.value)


def test_the_same_error_each_time() -> None:
    compiled = strict(_if)
    for _ in range(3):
        with pytest.raises(DataDependentError):
            compiled(leaf(3))


def test_data_dependence_falls_back_nowhere_silently() -> None:
    compiled = aheadgrad.compile(_if, frontend="trace")
    x = leaf(3)
    with pytest.warns(FallbackWarning, match=f'frontend="dynamo" .*test_errors.py:{_here(_if)}'):
        out = compiled(x)
    assert torch.equal(out, _if(x))
    assert torch.equal(compiled(x), _if(x))
    assert list(compiled.fallbacks.values()) == [2]


def test_the_callers_tensors_are_as_before() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.t_()
        y.mul_(2)
        if x.sum() > 0:
            return x
        return y

    x, y = torch.zeros(3), torch.arange(6.0).view(2, 3)
    before = y.clone()
    with pytest.raises(CaptureError):
        strict(fn)(x, y)
    assert torch.equal(x, torch.zeros(3))
    assert x._version == 0
    assert torch.equal(y, before)
    assert y.stride() == (3, 1)


def test_the_module_is_as_before() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("count", torch.zeros(()))
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            self.kept = x * 2
            return _if(self.norm(x))

    model = Branch()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    with pytest.raises(CaptureError):
        strict(model)(leaf(4, 3))
    assert objects == [id(t) for t in (*model.parameters(), *model.buffers())]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.kept is None
    assert type(model.norm.weight) is nn.Parameter
    model.norm(leaf(4, 3))


class Mine(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def test_the_users_own_exceptions() -> None:
    original = Mine(3, "mine")

    def fn(x: Tensor) -> Tensor:
        raise original

    with pytest.raises(Mine) as caught:
        strict(fn)(leaf(3))
    assert caught.value is original
    assert any(entry.name == "fn" for entry in caught.traceback)


@pytest.mark.parametrize(
    "kind", [ValueError, KeyError, RuntimeError, NotImplementedError, StopIteration, AssertionError]
)
def test_kinds_of_exceptions(kind: type[Exception]) -> None:
    def fn(x: Tensor) -> Tensor:
        raise kind("text")

    with pytest.raises(kind) as caught:
        strict(fn)(leaf(3))
    assert type(caught.value) is kind
    assert caught.value.args == ("text",)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exits(kind: type[BaseException]) -> None:
    def fn(x: Tensor) -> Tensor:
        raise kind

    with pytest.raises(kind):
        strict(fn)(leaf(3))
    assert torch.equal(strict(lambda x: x * 2)(torch.ones(2)), torch.full((2,), 2.0))


def test_exceptions_caught_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        try:
            return x @ torch.ones(7)
        except RuntimeError:
            return x * 2

    x = leaf(3)
    assert torch.equal(strict(fn)(x), x * 2)


@pytest.mark.parametrize(
    "fn, kind",
    [
        (lambda x: x @ torch.ones(7), RuntimeError),
        (lambda x: x.view(7), RuntimeError),
        (lambda x: x[5], IndexError),
        (lambda x: x.nothing, AttributeError),
        (lambda x: x + "text", TypeError),
        (lambda x: torch.cat([x, torch.ones(2, 2)]), RuntimeError),
        (lambda x: x.add_(1), RuntimeError),
    ],
)
def test_errors_of_ops(fn: Callable[[Tensor], Any], kind: type[Exception]) -> None:
    x = leaf(3)
    with pytest.raises(kind):
        fn(x)
    with pytest.raises(kind):
        strict(fn)(x)


def test_a_generator_is_no_result() -> None:
    def fn(x: Tensor) -> Any:
        return (x * i for i in range(3))

    compiled = aheadgrad.compile(fn, frontend="trace")
    x = leaf(3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            found = list(compiled(x))
    except AheadgradError:
        return
    assert all(torch.equal(a, b) for a, b in zip(found, fn(x), strict=True))


def test_an_unknown_object_that_holds_tensors_is_no_result() -> None:
    """A traced tensor must never leak out of the call inside an object that pytree does not know."""

    class Box:
        def __init__(self, t: Tensor) -> None:
            self.t = t

    compiled = aheadgrad.compile(lambda x: Box(x * 2), frontend="trace")
    x = leaf(3)
    for _ in range(2):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                found = compiled(x)
        except AheadgradError:
            return
        assert torch.equal(found.t, x * 2)


def test_a_traced_tensor_that_leaks_is_told() -> None:
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        kept.append(x * 3)
        return x * 2

    compiled = aheadgrad.compile(fn, frontend="trace")
    x = leaf(3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            compiled(x)
    except AheadgradError:
        return
    assert torch.equal(kept[-1], x * 3)


# subclasses and options


class Tagged(Tensor):
    """A subclass with behaviour of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_unsupported_subclass_is_named() -> None:
    def fn(first: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return first * batch["tagged"]

    x, t = leaf(3), torch.ones(3).as_subclass(Tagged)
    with pytest.raises(FallbackError, match=r"batch\['tagged'\].*Tagged") as caught:
        strict(fn)(x, {"tagged": t})
    assert "Tagged" in caught.value.reason
    assert 'fallback="warn"' in str(caught.value)


def test_an_unsupported_subclass_warns_once() -> None:
    compiled = aheadgrad.compile(lambda x: x * 2, frontend="trace")
    t = torch.ones(3).as_subclass(Tagged)
    with pytest.warns(FallbackWarning, match="Tagged") as seen:
        for _ in range(3):
            assert torch.equal(compiled(t), t * 2)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert list(compiled.fallbacks.values()) == [3]


def test_a_subclass_that_is_a_parameter_of_a_module() -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.ones(3, 3).as_subclass(Tagged))
    assert type(model.weight) is Tagged
    with pytest.raises(FallbackError, match="weight"):
        strict(model)(leaf(2, 3))


@pytest.mark.parametrize(
    "options, listed",
    [
        ({"backend": "nope"}, ["eager"]),
        ({"fallback": "maybe"}, ["warn", "error"]),
        ({"fallback": None}, ["warn", "error"]),
        ({"dynamic": "x"}, ["True", "False", "None"]),
        ({"dynamic": 2}, ["True", "False", "None"]),
        ({"partition": "nope"}, ["default"]),
        ({"backward_autocast": "nope"}, ["eager", "same_as_forward", "off"]),
        ({"max_entries": 0}, ["max_entries"]),
        ({"max_entries": "many"}, ["max_entries"]),
    ],
)
def test_bad_options(options: dict[str, Any], listed: list[str]) -> None:
    with pytest.raises(InvalidOption) as caught:
        aheadgrad.compile(lambda x: x, **options, frontend="trace")
    for word in listed:
        assert word in str(caught.value)
    with pytest.raises(InvalidOption):
        aheadgrad.compile(**options, frontend="trace")


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        aheadgrad.compile(lambda x: x, no_such_option=1, frontend="trace")  # type: ignore[call-arg]


@pytest.mark.parametrize("thing", [3, "text", torch.ones(2), [1]])
def test_what_cannot_be_compiled(thing: Any) -> None:
    with pytest.raises(AheadgradError, match=type(thing).__name__):
        aheadgrad.compile(thing, frontend="trace")


def test_errors_in_backward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise Mine(5, "in backward")

    compiled = strict(lambda x: Broken.apply(x))
    x = leaf(3)
    for _ in range(2):
        out = compiled(x)
        with pytest.raises(Mine, match="in backward"):
            out.sum().backward()


def test_inside_the_generated_code_the_traceback_can_be_read() -> None:
    import traceback

    compiled = strict(lambda x, i: x[i] * 2)
    x = leaf(3)
    compiled(x, torch.tensor([0]))
    with pytest.raises(IndexError) as caught:
        compiled(x, torch.tensor([9]))
    lines = "".join(traceback.format_exception(caught.value))
    assert "index" in lines

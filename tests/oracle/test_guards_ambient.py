"""The state around a call that an entry assumes: devices, switches, autocast, modes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.errors import FallbackWarning

from .common import agree, assert_equal, leaf, strict


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEVICES: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "meta": lambda: torch.device("meta"),
    "cpu": lambda: torch.device("cpu"),
    "default meta": lambda: default_device("meta"),
}


@pytest.mark.parametrize("second", DEVICES)
@pytest.mark.parametrize("first", DEVICES)
def test_default_devices(first: str, second: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, str]:
        made = torch.zeros(3)
        return x * 2, str(made.device)

    compiled = strict(fn)
    for name in (first, second, first, second):
        with DEVICES[name]():
            x = torch.ones(3, device="cpu", requires_grad=True)
            agree(fn, compiled, x)


def test_tensors_made_under_a_default_device() -> None:
    def fn() -> Tensor:
        return torch.ones(3) * 2

    compiled = strict(fn)
    for name in ("none", "meta", "none", "default meta", "cpu"):
        with DEVICES[name]():
            assert compiled().device == fn().device


def test_deterministic_and_warning_only() -> None:
    def fn(x: Tensor) -> Tensor:
        if not torch.are_deterministic_algorithms_enabled():
            return x * 1
        return x * (2 if torch.is_deterministic_algorithms_warn_only_enabled() else 3)

    compiled = strict(fn)
    try:
        for on, warn in ((False, False), (True, False), (True, True), (False, False), (True, True)):
            torch.use_deterministic_algorithms(on, warn_only=warn)
            agree(fn, compiled, leaf(3))
    finally:
        torch.use_deterministic_algorithms(False)


AUTOCASTS: dict[str, Callable[[], Any]] = {
    "off": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "no cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "other device": lambda: torch.autocast("xpu", torch.bfloat16),
}


def test_autocast_of_every_kind() -> None:
    def fn(x: Tensor) -> tuple[Tensor, bool]:
        return x @ x, torch.is_autocast_cache_enabled()

    compiled = strict(fn, max_entries=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in [*AUTOCASTS] * 2:
            with AUTOCASTS[name]():
                agree(fn, compiled, leaf(3, 3))


def test_switches_turned_inside_run_uncompiled() -> None:
    def dtype(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        made = torch.ones(3)
        torch.set_default_dtype(torch.float32)
        return x * made

    def kept(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return x * 2

    def inference(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return x * 2

    def deterministic(x: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        out = x * (2 if torch.are_deterministic_algorithms_enabled() else 3)
        torch.use_deterministic_algorithms(False)
        return out

    for fn in (dtype, kept, inference, deterministic):
        compiled = aheadgrad.compile(fn, frontend="trace")
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                found = compiled(leaf(3))
            state = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            expected = fn(leaf(3))
            assert torch.get_default_dtype() == state
            torch.set_default_dtype(torch.float32)
            assert_equal(found, expected)
            assert found.is_inference() == expected.is_inference()
        assert sum(compiled.fallbacks.values()) == 2


def test_a_function_mode_around_the_call_sees_everything() -> None:
    from torch.overrides import TorchFunctionMode

    class Log(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def fn(x: Tensor) -> Tensor:
        return torch.sin(x) * 2

    compiled = aheadgrad.compile(fn, frontend="trace")
    compiled(leaf(3))
    with warnings.catch_warnings(), Log() as log:
        warnings.simplefilter("ignore", FallbackWarning)
        compiled(leaf(3))
    assert "sin" in log.seen

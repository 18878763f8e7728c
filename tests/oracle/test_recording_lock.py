"""One recording at a time in the process; torch is itself again afterwards, and meanwhile for others."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.torchlayer.functional import noticing_set
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.own_kernels import _ops
from aheadgrad.torchlayer.random import noticing_changes

from .common import leaf, strict
from .test_threads import in_threads


def patched_things() -> dict[str, Any]:
    """Everything of torch's that a recording patches, by name."""
    found: dict[str, Any] = {"set_": Tensor.__dict__.get("set_"), "compile": torch.compile}
    for name in ("set_rng_state", "manual_seed", "seed", "default_generator"):
        found |= {name: getattr(torch, name), f"random.{name}": getattr(torch.random, name)}
    for cls in (torch.SymInt, torch.SymFloat, torch.SymBool):
        for name in ("__class__", "__repr__", "__format__", "__eq__", "__add__"):
            found[f"{cls.__name__}.{name}"] = cls.__dict__.get(name)
    for op in _ops():
        found |= {f"{op} {key}": value for key, value in op.py_kernels.items()}
    return found


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    importlib.import_module("torch._dynamo")  # which replaces torch.manual_seed at first

    before = patched_things()
    yield
    after = patched_things()
    assert [k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)] == []


def programs() -> list[Callable[..., Tensor]]:
    """New functions each time: each of them is recorded."""
    return [
        lambda x: (x.sin() * x.shape[0]).sum(),
        lambda x: nn.functional.interpolate(x[None], scale_factor=2.0).softmax(-1)[0, :, 0].sum(),
        lambda x: (nn.functional.dropout(x, 0.0) @ x.t()).relu().sum(),
    ]


def record_something(i: int) -> None:
    for fn in programs():
        x = leaf(2 + i % 3, 3, seed=i)
        compiled = strict(fn, dynamic=bool(i % 2))
        (grad,) = torch.autograd.grad(compiled(x), x, create_graph=bool(i % 5 == 0))
        (expected,) = torch.autograd.grad(fn(x), x)
        torch.testing.assert_close(grad, expected)


def test_two_threads_record_different_functions() -> None:
    def work(i: int) -> None:
        for k in range(34):  # three functions each
            record_something(i + k)

    in_threads(2, work)


def test_others_are_not_disturbed() -> None:
    done = threading.Event()

    def eager() -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            rounds += 1
            x, y = torch.ones(3), torch.arange(4.0)
            assert x.set_(y) is x and x.shape == (4,)
            state = torch.get_rng_state()
            first = torch.rand(5)
            torch.set_rng_state(state)
            assert torch.equal(torch.rand(5), first)
            n = torch.nn.functional.interpolate(torch.ones(1, 1, 4), scale_factor=2.0).shape[-1]
            assert isinstance(n, int) and f"{n}" == "8" and type(n) is int
        return rounds

    def work(i: int) -> None:
        if i == 2:
            eager()
            return
        try:
            for k in range(5):
                record_something(i + k)
        finally:
            if i == 0:
                done.set()

    in_threads(3, work)


def test_patches_act_in_the_thread_that_records() -> None:
    state = torch.get_rng_state()

    def elsewhere() -> None:
        torch.set_rng_state(state)

    with RECORDING, noticing_changes() as notes:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert notes == []
        torch.set_rng_state(state)
        torch.manual_seed(0)
        assert notes == ["set_state", "manual_seed"]


def test_patching_without_the_lock_is_refused() -> None:
    with pytest.raises(AssertionError, match="recording lock"), noticing_changes():
        pass


def test_a_recording_inside_a_recording() -> None:
    seen: list[str] = []
    with RECORDING, noticing_set(lambda t, sources: seen.append("outer")):
        with RECORDING, noticing_set(lambda t, sources: seen.append("inner")):
            torch.zeros(3).set_(torch.ones(2))
        torch.zeros(3).set_(torch.ones(2))
    torch.zeros(3).set_(torch.ones(2))
    assert seen == ["inner", "outer", "outer"]


def test_backwards_of_new_patterns_in_many_threads() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin(), x.cos() * 2, (x * x).t()

    compiled = strict(fn)
    compiled(leaf(3, 4))

    def work(i: int) -> None:
        for k in range(6):
            x = leaf(3, 4, seed=i)
            outs, expected = compiled(x), fn(x)
            chosen = [j for j in range(3) if (i + k) >> j & 1] or [2]
            grads = [
                torch.autograd.grad([o[j].sum() for j in chosen], x, create_graph=k % 2 == 1)
                for o in (outs, expected)
            ]
            torch.testing.assert_close(*grads)

    in_threads(8, work)


def test_a_waiting_thread_and_dynamo() -> None:
    """One thread compiles through Dynamo (whose own lock it holds), the other records and calls Dynamo."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def helper(x: Tensor) -> Tensor:
        return x * 3

    def work(i: int) -> None:
        for k in range(4):
            x = leaf(2 + k, 3, seed=k)
            if i % 2:
                fn = torch.compile(lambda t, k=k: (t * k).sin(), backend="aheadgrad", dynamic=False)
                torch.testing.assert_close(fn(x), (x * k).sin())
            else:
                fn = aheadgrad.compile(lambda t, k=k: helper(t) * k, frontend="trace", fallback="warn")
                torch.testing.assert_close(fn(x), x * 3 * k)

    in_threads(4, work)
    torch._dynamo.reset()

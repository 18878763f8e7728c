"""Many threads at once: each gets a right answer, one of them compiles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from .common import leaf, strict


def in_threads(count: int, work: Callable[[int], None]) -> None:
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_many_threads_make_the_first_call() -> None:
    calls = SimpleNamespace(count=0)

    def fn(x: Tensor) -> Tensor:
        calls.count += 1
        return (x * 2).sin().sum()

    compiled = strict(fn)

    def work(i: int) -> None:
        x = leaf(5, seed=i)
        compiled(x).backward()
        torch.testing.assert_close(x.grad, (x * 2).cos() * 2)

    in_threads(12, work)
    assert len(compiled.entries) == 1
    assert calls.count == 1


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_many_threads_with_other_shapes(dynamic: bool | None) -> None:
    compiled = strict(lambda x, n: (x * n).sin().sum(), max_entries=100, dynamic=dynamic)

    def work(i: int) -> None:
        for k in range(12):
            x, n = leaf(2 + (i + k) % 5, seed=i), 1 + k % 3
            compiled(x, n).backward()
            torch.testing.assert_close(x.grad, (x * n).cos() * n)

    in_threads(8, work)


def test_many_threads_on_one_module() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    net.requires_grad_(False)
    weights = [p.clone() for p in net.parameters()]
    compiled = strict(net, max_entries=100, dynamic=False)

    def work(i: int) -> None:
        for k in range(10):
            x = leaf(1 + (i + k) % 6, 3, seed=i)
            hidden = torch.tanh(x @ weights[0].t() + weights[1])
            torch.testing.assert_close(compiled(x), hidden @ weights[2].t() + weights[3])

    in_threads(8, work)
    assert len(compiled.entries) == 6


def test_threads_in_other_modes() -> None:
    compiled = strict(lambda x: x * 2)

    def work(i: int) -> None:
        for _ in range(20):
            with torch.no_grad() if i % 2 else nullcontext():
                assert compiled(leaf(3)).requires_grad == (i % 2 == 0)

    in_threads(6, work)

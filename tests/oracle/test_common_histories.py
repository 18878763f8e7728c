"""Outputs with a common history: a backward of one comes by nothing that belongs to the others alone.

Which hooks are called, and with what; which later backward finds its history freed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad


def two_heads(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    h = (x @ w).tanh()
    return h @ v, h @ u


def nothing_saved_in_common(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    h = x + 1
    return h.sin(), h.cos()


def something_saved_in_common(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    h = x.sin()
    return h * 2, h * 3


def one_after_the_other(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    h = (x * w).sin()
    k = h * v
    return k.exp(), k.cos() * u, h * u


def returned_in_between(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    h = (x * w).sin()
    k = h * v
    last = k.exp()
    return h, last, k.cos() * u, last * u + h


def of_one_op(x: Tensor, w: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    h = x * w
    q, r = torch.linalg.qr(h)
    return q, r, h.sin()


def two_ways_in_common(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    h, k = x.exp(), w.sin()
    return h * k * v, (h + k * 2) * u


def views_and_changes(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    h = x * w
    part = h[0]
    v.mul_(h)
    return h, part, part.sin() * u, v + 1


PROGRAMS = [
    two_heads,
    nothing_saved_in_common,
    something_saved_in_common,
    one_after_the_other,
    returned_in_between,
    of_one_op,
    two_ways_in_common,
    views_and_changes,
]


def observe(
    fn: Callable[..., Any], which: tuple[int, ...], retain: bool, histories: bool = True
) -> list[str]:
    """What hooks see, what backwards raise and leave behind, also in the history of the inputs."""
    torch.manual_seed(0)
    leaves = [torch.randn(3, 3, requires_grad=True) for _ in range(4)]
    log: list[str] = []

    def listen(name: str, t: Tensor) -> None:
        t.register_hook(lambda g: log.append(f"{name}: {'none' if g is None else round(float(g.sum()), 4)}"))

    for k, leaf in enumerate(leaves):
        listen(f"leaf {k}", leaf)
    inputs = [leaf * 1.5 for leaf in leaves] if histories else leaves
    outs = fn(*inputs)
    for k, out in enumerate(outs):
        listen(f"output {k}", out)
        out.retain_grad()

    def back(name: str, t: Tensor, **options: Any) -> None:
        seen, log[:] = list(log), []
        try:
            t.sum().backward(**options)
        except RuntimeError as error:
            log[:] = [str(error)[:40]]
        grads = [None if t.grad is None else round(float(t.grad.sum()), 4) for t in (*leaves, *outs)]
        log[:] = [*seen, name, *sorted(log), str(grads)]

    for k in which:
        back(f"backward of {k}", outs[k], retain_graph=retain)
    for k, t in enumerate(inputs):
        back(f"backward of input {k}", t * t)
    return log


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_backward_comes_by_what_eager_does(fn: Callable[..., Any], frontend: str) -> None:
    compiled = aheadgrad.compile(fn, fallback="error", frontend=frontend, backend="eager")
    count = len(fn(*(torch.ones(3, 3) for _ in range(4))))
    for which in (w for n in (1, 2) for w in permutations(range(count), n)):
        for retain in (False, True):
            assert observe(compiled, which, retain) == observe(fn, which, retain), (which, retain)


@pytest.mark.parametrize("fn", [two_heads, one_after_the_other, returned_in_between, two_ways_in_common])
def test_hooks_of_leaves_are_called_as_in_eager(fn: Callable[..., Any]) -> None:
    compiled = aheadgrad.compile(fn, fallback="error", frontend="trace", backend="eager")
    count = len(fn(*(torch.ones(3, 3) for _ in range(4))))
    for which in (w for n in (1, 2) for w in permutations(range(count), n)):
        assert observe(compiled, which, True, False) == observe(fn, which, True, False), which


def test_what_is_saved_for_another_output_may_change() -> None:
    def fn(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + 2
        return h * v, h * w

    for run in (fn, aheadgrad.compile(fn, fallback="error", frontend="trace")):
        x, v, w = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3)
        out, other = run(x, v, w)
        w.mul_(2)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.tolist() == [1.0] * 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.sum().backward()


def test_hooks_of_outputs_are_removed_and_change_gradients_as_in_eager() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        return h * 2, h * 3

    def play(fn: Callable[..., Any]) -> Any:
        x = torch.ones(3, requires_grad=True)
        a, b = fn(x)
        a.register_hook(lambda g: g * 2)
        removed = a.register_hook(lambda g: g * 100)
        a.register_hook(lambda g: g + 1)
        removed.remove()
        wanted = torch.autograd.grad((a + b).sum(), (a, x), retain_graph=True)
        a.mul_(2)
        a.register_hook(lambda g: g * 5)
        return wanted + torch.autograd.grad((a + b).sum(), (a, x))

    torch.testing.assert_close(play(aheadgrad.compile(fn, fallback="error", frontend="trace")), play(fn))

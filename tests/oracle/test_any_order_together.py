"""Higher derivatives of calls that meet others: chained, nested, in hooks, in threads, with odd tangents."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from .common import strict
from .plays import agree, assert_alike, double, grad


def body(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).sin()


def pair() -> tuple[Tensor, Tensor]:
    return double(3, 3, seed=1), double(3, 3, seed=2)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda b: b.t(),
    "joined": lambda b: torch.cat([b[:1], b[1:]]),
    "changed in place": lambda b: b.clone().mul_(2),
    "viewed back": lambda b: b.view(-1).view(3, 3),
    "expanded row": lambda b: b.unbind(0)[0].expand(3, 3),
    "real part": lambda b: torch.view_as_real(torch.complex(b, b))[..., 0],
    "one of several views": lambda b: b.split(3)[0],
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_with_any_history(kind: str) -> None:
    def play(run: Any) -> Any:
        a, w = pair()
        x = INPUTS[kind](a)
        (g,) = grad(run(x, w), x)
        h = grad(g, [a, w])
        return g, h, grad(h, [a, w])

    agree(body, play)


def test_tangents_that_are_inputs_or_outputs() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        y = run(x, w)
        ends = []
        for t in (x, w, y, x.t(), y.detach(), double(1, 3).expand(3, 3), double(5, 6)[1:4, ::2]):
            g = grad(y, [x, w], t)
            ends.append((g, grad(g, [x, w])))
        return ends

    agree(body, play)


def test_more_layouts_than_are_kept() -> None:
    def fn(x: Tensor) -> Any:
        return x.sin() * 2, x.exp(), x.pow(3)

    def play(run: Any) -> Any:
        x = double(2, 3, 4, seed=1)
        outs = run(x)
        ends = []
        for order, present in itertools.product(itertools.permutations(range(3)), range(1, 8)):
            chosen = [o for i, o in enumerate(outs) if present >> i & 1]
            shape = [x.shape[d] for d in order]
            back = [order.index(d) for d in range(3)]
            tangents = [double(*shape, seed=present + i).permute(back) for i in range(len(chosen))]
            (g,) = grad(chosen, x, tangents)
            ends.append((g, grad(g, x, create_graph=bool(present % 2), retain_graph=True)))
        return ends

    agree(fn, play, calls=1)


def test_edges_instead_of_tensors() -> None:
    def play(run: Any) -> Any:
        a, w = pair()
        x = a * 2
        (g,) = grad(run(x, w), [get_gradient_edge(x)])
        end = get_gradient_edge(run(x, w))
        k = grad([end], [x, w], [torch.ones(3, 3, dtype=torch.float64)])
        return g, grad(g, [a, w]), k, grad(k, [a, w])

    agree(body, play)


def test_a_compiled_update_in_an_unrolled_loop() -> None:
    def update(params: list[Tensor], grads: Any, rate: Tensor) -> list[Tensor]:
        return [p - rate * g for p, g in zip(params, grads, strict=True)]

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        return (body(x, params[0]) + params[1]).pow(2).mean()

    def unrolled(loss: Any, update: Any) -> Any:
        x, w = pair()
        b, rate = double(3, seed=3), double(seed=4)
        params = [w, b]
        for _ in range(3):
            params = update(params, grad(loss(params, x), params), rate)
        end = loss(params, x)
        return end, torch.autograd.grad(end, [w, b, rate, x])

    expected = unrolled(loss, update)
    assert_alike(expected, unrolled(strict(loss), strict(update)))
    assert_alike(expected, unrolled(loss, strict(update)))
    assert_alike(expected, unrolled(strict(loss), update))


def test_a_compiled_function_inside_another() -> None:
    inner = strict(body)

    def play(run: Any) -> Any:
        x, w = pair()
        g = grad(run(x, w), [x, w])
        return g, grad(g, [x, w])

    expected = play(lambda x, w: body(body(x, w) * 2, w))
    assert_alike(expected, play(strict(lambda x, w: inner(inner(x, w) * 2, w))))
    assert_alike(expected, play(lambda x, w: inner(body(x, w) * 2, w)))


def test_hooks_that_call_and_differentiate() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        log: list[Any] = []

        def look(_: Tensor) -> None:
            a, b = pair()
            with torch.enable_grad():
                log.append(grad(grad(run(a, b), [a, b]), [a, b]))

        y = run(x, w)
        y.register_hook(lambda g: g * run(x, w))
        x.register_hook(look)
        g = grad(y, [x, w])
        return log, g, grad(g, [x, w])

    agree(body, play)


def test_each_order_in_a_thread_of_its_own() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        ends: list[Any] = [run(x, w)]
        for _ in range(3):
            thread = threading.Thread(target=lambda: ends.append(grad(ends[-1], [x, w])))
            thread.start()
            thread.join()
        return ends

    agree(body, play)


def test_a_checkpoint_around_gradients_of_checkpoints() -> None:
    def play(run: Any) -> Any:
        def inner(x: Tensor, w: Tensor) -> Tensor:
            y = run(x, w)
            (g,) = grad(y, x)
            return g * y

        x, w = pair()
        once = torch.autograd.grad(checkpoint(inner, x, w, use_reentrant=False).sum(), [x, w])
        z = checkpoint(run, checkpoint(run, x, w, use_reentrant=False), w, use_reentrant=False)
        g = grad(z, [x, w])
        return once, g, grad(g, [x, w])

    agree(body, play)


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm]
)
def test_parametrized_modules(norm: Any) -> None:
    torch.manual_seed(0)
    module = norm(nn.Linear(3, 3)).double()

    def penalties(make: Any) -> Any:
        own = copy.deepcopy(module)
        run, x, ends = make(own), double(2, 3), []
        for _ in range(2):
            (g,) = grad(run(x).tanh(), x)
            ends.append(torch.autograd.grad(g.pow(2).sum(), list(own.parameters()), allow_unused=True))
        return ends

    assert_alike(penalties(lambda m: m), penalties(strict))


def test_sixth_order() -> None:
    def play(run: Any) -> Any:
        x = double(3)
        y, ends = run(x), []
        for _ in range(6):
            (y,) = grad(y, x)
            ends.append(y)
        return ends

    agree(lambda x: (x * x.sin()).exp(), play, calls=1)


def test_saved_whole_beside_a_part() -> None:
    """The derivative of a decomposition keeps what only the next order needs, although a part is kept."""

    def fn(x: Tensor) -> Any:
        values = torch.linalg.svdvals(x)
        return values[0] / values[-1], (x.t() @ x).sum(), torch.linalg.solve(x, x.sin())

    def play(run: Any) -> Any:
        x = double(3, 3)
        ratio, square, solved = run(x)
        (g,) = grad([ratio, square, solved], x)
        return g, grad(g, x)

    agree(fn, play)


def test_a_view_of_what_was_kept() -> None:
    """Higher derivatives solve with the transposed matrix, of which only the base is kept."""

    def play(run: Any) -> Any:
        x = (torch.eye(3, dtype=torch.float64) * 4 + double(3, 3).detach()).requires_grad_()
        (g,) = grad(run(x), x)
        (h,) = grad(g, x)
        return g, h, grad(h, x)

    agree(torch.logdet, play)
    agree(lambda x: torch.linalg.solve(x.t()[:2, :2], x[:2]), play)

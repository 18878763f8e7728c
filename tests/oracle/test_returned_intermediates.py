"""Outputs that other outputs were computed from: gradients arrive there as in eager."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from .plays import agree, double, grad


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0] * 2, None  # an own rule, on purpose


def shared(x: Tensor, w: Tensor) -> Any:
    t = x.exp()
    h = t * w
    return h, h.sin() * t


def saved_by_both(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    k = h * h * w
    return h, k, (h * k).tanh() + x


def custom(x: Tensor, w: Tensor) -> Any:
    t = Scaled.apply(x, 3.0)
    h = t * w
    return h, Scaled.apply(h * x, 2.0), (h * t).sum()


def several_at_once(x: Tensor, w: Tensor) -> Any:
    values, _ = torch.sort(torch.stack([x * w, x + w]), 0)
    a, b = (values * 2).unbind()
    return values, (a * b).sin(), values[0] * x


def view_of_an_input(x: Tensor, w: Tensor) -> Any:
    h = x.t()
    return h, (h * w).sin() + x


def view_of_an_output(x: Tensor, w: Tensor) -> Any:
    h = x * w
    v = h.view(-1)
    return h, v, (v.sin() * 2).view(3, 3) + h


def views_of_a_hidden_base(x: Tensor, w: Tensor) -> Any:
    h = x * w
    a, b = h[0], h[1:]
    return a, b, a.exp() * b * w[0]


def parts(x: Tensor, w: Tensor) -> Any:
    h = x * w
    a, b, c = h.split(1)
    return a, b, h, (a * b).sin() + c


def parts_of_an_input(x: Tensor, w: Tensor) -> Any:
    a, b, _ = x.unbind()
    return b, a, a.exp() * b * w[0]


def views_of_views(x: Tensor, w: Tensor) -> Any:
    v = (x * w)[1:]
    u = v[1:]
    return u, v, u.view(-1), (u.sin() * w[2]).view(-1) + v[0]


def states(x: Tensor, w: Tensor) -> Any:
    found = [x]
    for _ in range(4):
        found.append((found[-1] @ w).tanh())
    return found[1:]


FUNCTIONS = [
    shared,
    saved_by_both,
    custom,
    several_at_once,
    view_of_an_input,
    view_of_an_output,
    views_of_a_hidden_base,
    parts,
    parts_of_an_input,
    views_of_views,
    states,
]


def inputs() -> tuple[Tensor, Tensor]:
    return double(3, 3, seed=1), double(3, 3, seed=2)


def of_all(run: Any) -> Any:
    x, w = inputs()
    outs = run(x, w)
    return torch.autograd.grad(outs[-1].sum(), [*outs[:-1], x, w], allow_unused=True)


def of_each_by_each(run: Any) -> Any:
    x, w = inputs()
    outs = run(x, w)
    return [
        torch.autograd.grad(a.sum(), [b, x, w], allow_unused=True, retain_graph=True)
        for a in outs
        for b in outs
    ]


def retained_and_hooked(run: Any) -> Any:
    x, w = inputs()
    outs = run(x, w)
    for out in outs:
        out.retain_grad()
        out.register_hook(lambda g: g * 1.5)
    sum(out.sum() for out in outs).backward()
    return [t.grad for t in (*outs, x, w)]


def not_beyond(run: Any) -> Any:
    x, w = inputs()
    outs = run(x, w)
    outs[0].retain_grad()
    outs[-1].sum().backward(inputs=[outs[0]])
    return outs[0].grad, x.grad, w.grad


def with_history(run: Any) -> Any:
    x, w = (t * 1 for t in inputs())
    outs = run(x, w)
    return torch.autograd.grad(outs[-1].sum(), [*outs[:-1], x, w], allow_unused=True)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients(fn: Callable[..., Any], dynamic: bool | None) -> None:
    plays = [of_all, of_each_by_each, retained_and_hooked, not_beyond, with_history]
    agree(fn, *plays, dynamic=dynamic)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_second_derivatives(fn: Callable[..., Any]) -> None:
    def play(run: Any) -> Any:
        x, w = inputs()
        outs = run(x, w)
        first = grad(outs[-1], [outs[0], x, w], allow_unused=True)
        return first, grad(first, [x, w], allow_unused=True, create_graph=False)

    agree(fn, play)


def test_gradients_replaced_on_the_way() -> None:
    """A hook's result goes on into the history of the intermediate."""

    def play(run: Any) -> Any:
        x, w = inputs()
        h, out = run(x, w)
        h.register_hook(torch.zeros_like)
        out.sum().backward()
        return x.grad, w.grad

    agree(shared, play)


def test_one_after_the_other() -> None:
    def play(run: Any) -> Any:
        x, w = inputs()
        h, out = run(x, w)
        h.sum().backward()
        out.sum().backward()

    agree(shared, refused=[play])
    agree(lambda x, w: (x + w, (x + w).sin()), lambda run: [o.sum().backward() for o in run(*inputs())])


def test_the_intermediate_is_changed() -> None:
    """Only who needs it is refused."""

    def play(which: int) -> Callable[[Any], Any]:
        def played(run: Any) -> Any:
            x, w = inputs()
            outs = run(x, w)
            with torch.no_grad():
                outs[0].mul_(2)
            outs[which].sum().backward()
            return x.grad, w.grad

        return played

    agree(lambda x, w: ((h := x + w), h.sin()), play(0), refused=[play(1)])


# inputs that the call changes


def changed(x: Tensor, w: Tensor) -> Any:
    x.mul_(w)
    return x.sin() * w


def changed_twice(x: Tensor, w: Tensor) -> Any:
    x.mul_(2)
    y = x.exp()
    w.add_(y)
    return x, y, w.sin() * x


def changed_and_viewed(x: Tensor, w: Tensor) -> Any:
    x.mul_(w)
    v = x[1:]
    return x, v, v[0].sin() * w[0]


def changed_again_out_of_sight(x: Tensor, w: Tensor) -> Any:
    x.mul_(w)
    y = x + x
    x.detach().copy_(y)
    return y * 2


def needed_as_it_was(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    x.sin_()
    return x.exp() * y


def both_needed_as_they_were(x: Tensor, w: Tensor) -> Any:
    y = x + w
    x.mul_(y)
    w.add_(x)
    return x * w * y, y


def changed_and_reshaped(x: Tensor, w: Tensor) -> Any:
    y = x + w
    x.mul_(2)
    x.unsqueeze_(0)
    return x.sin() * w, y


CHANGES = [
    changed,
    changed_twice,
    changed_and_viewed,
    changed_again_out_of_sight,
    needed_as_it_was,
    both_needed_as_they_were,
]


@pytest.mark.parametrize(
    ("fn", "view"),
    [(changed_and_reshaped, False), *product(CHANGES, [False, True])],
)
def test_inputs_that_the_call_changes(fn: Callable[..., Any], view: bool) -> None:
    """A view's history is made anew by autograd once its memory has changed out of sight."""

    def play(run: Any) -> Any:
        leaves = inputs()
        x, w = (t[:] if view else t for t in (t * 1 for t in leaves))
        out = run(x, w)
        outs = [*(out if isinstance(out, tuple) else [out]), x, w]
        found = [
            torch.autograd.grad(a.sum(), [b, *leaves], allow_unused=True, retain_graph=True)
            for a in outs
            for b in outs
        ]
        first = grad(outs[-3].sin(), list(leaves), allow_unused=True)
        return found, first, grad(first, list(leaves), allow_unused=True, create_graph=False), x._version

    agree(fn, play)


def test_a_changed_input_that_is_reshaped_out_of_sight() -> None:
    """Its history has the shape that autograd knows: gradients lead past it."""

    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        y = 3.0 - x
        with torch.no_grad():
            x.squeeze_()
        return y

    def play(run: Any) -> Any:
        x = double(1)
        y = run(x * 1)
        return y, torch.autograd.grad(y.sum(), x)

    agree(fn, play)


def changed_through_data(a: Tensor, b: Tensor) -> Any:
    b.data.add_(1)
    return b.cumsum(0) * 2, a.sin()


def changed_without_grad(a: Tensor, b: Tensor) -> Any:
    with torch.no_grad():
        a.mul_(2)
    c = b.sin() * a
    return c, c.exp() + b


@pytest.mark.parametrize("fn", [changed_through_data, changed_without_grad])
@pytest.mark.parametrize("leaf", [False, True])
def test_an_input_that_is_a_view_of_another_one(fn: Callable[..., Any], leaf: bool) -> None:
    def play(run: Any) -> Any:
        x = double(3, 1)
        a = x if leaf else x * 1
        b = a.view(1, 3)
        outs = run(a, b)
        wanted = [[b], [a], [a, b], [b, x], [x]]
        found = [
            torch.autograd.grad(o.sum(), w, allow_unused=True, retain_graph=True)
            for o in outs
            for w in wanted
        ]
        (first,) = torch.autograd.grad((outs[0] * outs[0]).sum(), b, create_graph=True)
        return found, first, torch.autograd.grad(first.sum(), [b, x], allow_unused=True)

    agree(fn, play)

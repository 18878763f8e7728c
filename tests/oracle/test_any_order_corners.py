"""Corners of higher derivatives: linear functions, shared memory, gradients within gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from .common import strict
from .plays import agree, double, grad


def body(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).sin().sum()


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


def second(run: Any) -> Any:
    x, w = pair()
    (g,) = grad(run(x, w), x)
    return g, grad(g, [x, w], allow_unused=True), grad(g, [x, w], allow_unused=True, create_graph=False)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x + w,
        lambda x, w: (x + w).sum(),
        lambda x, w: x - 2 * w,
        lambda x, w: (x.t(), w[0]),
        lambda x, w: torch.cat([x, w]),
        lambda x, w: (x.expand(2, 3, 3), w.sum().view(1)),
    ],
)
def test_linear_functions_and_their_tangents(fn: Callable[..., Any]) -> None:
    """A gradient may be a tangent itself, or a view of one; it is linear in the tangents."""

    def play(run: Any) -> Any:
        x, w = pair()
        outs = run(x, w)
        outs = outs if isinstance(outs, tuple) else (outs,)
        tangents = [double(*o.shape, seed=5 + i) for i, o in enumerate(outs)]
        first = torch.autograd.grad(outs, [x, w], tangents, create_graph=True)
        directions = [double(3, 3, seed=9 + i) for i in range(2)]
        back = torch.autograd.grad(first, tangents, directions, create_graph=True)
        again = torch.autograd.grad(back, directions, [t.detach() for t in back], allow_unused=True)
        return first, back, again

    agree(fn, play)


def test_outputs_that_are_inputs() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        a, b, c = run(x, w)
        (g,) = grad(a * b * c, x)
        return g, grad(g, [x, w])

    agree(lambda x, w: (x, x * w, w), play)


def test_patterns_one_after_the_other() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        h = (x * w).sin()
        return h * x, h.exp(), w**3

    def play(run: Any) -> Any:
        x, w = pair()
        outs = run(x, w)
        found = []
        for which in ((0,), (1,), (0, 1), (2,), (0, 2), (0, 1, 2)):
            roots = [outs[i].sum() for i in which]
            first = torch.autograd.grad(roots, [x, w], create_graph=True, allow_unused=True)
            found.append(first)
            found.append(grad(first, [x, w], allow_unused=True))
        return found

    agree(fn, play)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: ((x @ w.t()).tanh() @ w.t()).tanh() @ w.t(),
        lambda x, w: F.linear(F.linear(x, w).tanh(), w).tanh(),
        lambda x, w: (x[0] * w[0]).sin() * x[0] * w[0].view(3, 1) * x.t() * w.t(),
    ],
)
def test_the_same_view_taken_several_times(fn: Callable[..., Any]) -> None:
    agree(fn, second)


def test_only_one_of_the_gradients_is_kept() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        gx, gw = grad(run(x, w), [x, w])
        del gw
        return grad(gx, [x, w])

    agree(body, play)


def test_inputs_with_a_history() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        h = x.sin()
        k = w * h
        first = torch.autograd.grad(run(h, k), [h, k], create_graph=True)
        return first, grad(first, [x, w, h])

    agree(body, play)


def test_python_numbers() -> None:
    def play(run: Any) -> Any:
        found = []
        for scale in (1.5, 2, True):
            x = double(3)
            (g,) = grad(run(x, scale), x)
            found.append((g, grad(g, x)))
        return found

    agree(lambda x, scale: (x**3 * scale).sum(), play)


# inside the function


def test_gradients_taken_inside() -> None:
    def with_graph(x: Tensor, w: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((x**3 * w).sum(), x, create_graph=True)
        return g * w.sin()

    def without(x: Tensor, w: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((x**3 * w).sum(), x)
        return g * w.sin() * x**2

    agree(with_graph, second)
    agree(without, second)


def test_a_leaf_made_inside() -> None:
    def fn(x: Tensor) -> Any:
        w = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
        return w, (x * w) ** 2

    def play(run: Any) -> Any:
        x = double(3)
        w, out = run(x)
        (g,) = grad(out, w)
        return g, grad(g, [x, w])

    agree(fn, play)


def test_requires_grad_set_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        x.requires_grad_()
        return x**3

    def play(run: Any) -> Any:
        x = double(3, grad=False)
        (g,) = grad(run(x), x)
        return g, grad(g, x)

    agree(fn, play)


def test_a_write_hidden_from_autograd() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        y.detach().mul_(2)
        return y * x

    agree(fn, second)


# memory that is shared


def test_inputs_that_overlap() -> None:
    def play(run: Any) -> Any:
        base = double(6)
        (g,) = grad(run(base[:4], base[2:]), base)
        return g, grad(g, base)

    agree(lambda x, w: (x * w).exp().sum(), play)


def test_inputs_that_overlap_and_change() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(2)
        return (x * w).sin().sum()

    def play(run: Any) -> Any:
        base = double(6)
        copied = base * 1
        (g,) = grad(run(copied[:4], copied[2:]), base)
        return g, grad(g, base)

    agree(fn, play)


# gradients within gradients


class Implicit(torch.autograd.Function):
    """Its backward differentiates something by itself, cut off from the outer graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(x * w.exp(), [x, w], g)


class Attached(torch.autograd.Function):
    """Its backward differentiates something by itself, as a part of the outer graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            return torch.autograd.grad(x * w.exp(), [x, w], g, create_graph=True)


class Needs(torch.autograd.Function):
    """Computes only what is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * w, x.sin(), positive

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None, _: Any) -> Any:
        x, w = ctx.saved_tensors
        gx = gw = None
        if g is not None and ctx.needs_input_grad[0]:
            gx = g * w * ctx.scale
        if g is not None and ctx.needs_input_grad[1]:
            gw = g * x
        if h is not None:
            gx = h * x.cos() if gx is None else gx + h * x.cos()
        return gx, gw, None


@pytest.mark.parametrize("function", [Implicit, Attached])
def test_a_backward_that_differentiates(function: Any) -> None:
    agree(lambda x, w: function.apply(x * 1, w * 1) * x, second)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("weights", [True, False])
def test_a_backward_that_computes_what_is_needed(which: int, weights: bool) -> None:
    def play(run: Any) -> Any:
        x, w = double(3, seed=1), double(3, seed=2, grad=weights)
        (g,) = grad(run(x, w)[which], x)
        wanted = [x, w] if weights else [x]
        return g, grad(g, wanted, allow_unused=True) if g.requires_grad else None

    agree(lambda x, w: Needs.apply(x, w, 3), play)


def test_a_checkpoint_around_a_gradient() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = checkpoint(lambda a, b: grad(run(a, b), a)[0] * b, x, w, use_reentrant=False)
        return out, grad(out, [x, w])

    agree(body, play)


def test_meta_learning_with_functional_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def play(run: Any) -> Any:
        start = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        x, weights = double(5, 3), start
        for _ in range(2):
            inner = functional_call(run, weights, (x,)).pow(2).sum()
            first = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), first, strict=True)}
        functional_call(run, weights, (x,)).pow(2).sum().backward()
        return [p.grad for p in start.values()]

    agree(model, play)


def test_nothing_piles_up() -> None:
    compiled = strict(body)

    def third() -> None:
        x, w = pair()
        (g,) = grad(compiled(x, w), x)
        (h,) = grad(g, x)
        grad(h, [x, w], create_graph=False)

    for _ in range(3):
        third()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(10):
        third()
    gc.collect()
    assert len(gc.get_objects()) - before < 20


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_derivative_that_torch_has_not(create_graph: bool) -> None:
    """It raises what eager raises, also on the way to a third one."""

    def distances(x: Tensor, w: Tensor) -> Tensor:
        return torch.cdist(x, w)

    for run in (distances, strict(distances)):
        x, w = double(4, 3, seed=1), double(4, 3, seed=2)
        (g,) = torch.autograd.grad(run(x, w).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="_cdist_backward"):
            torch.autograd.grad(g.pow(2).sum(), x, create_graph=create_graph)


def test_tangents_that_are_lazily_conjugated() -> None:
    """Seed 3210038: `view_as_real`, in the derivative of `complex`, refuses them."""

    def both(a: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(a, a)
        return z.contiguous(), torch.stack([a, a * z])

    found = []
    for run in (both, strict(both)):
        a = torch.tensor(-1.3, requires_grad=True)
        z, w = run(a)
        tangents = [torch.full_like(t, 1 + 2j).requires_grad_() for t in (z, w)]
        (g,) = torch.autograd.grad((z, w), a, [tangents[0].conj(), tangents[1]], create_graph=True)
        found.append([g, *torch.autograd.grad(g**2, [a, *tangents])])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_a_result_that_is_changed_after_the_first_derivative(partition: str) -> None:
    """Eager saved it. With min-cut it was computed again, by the next order too, and nobody noticed."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).exp().exp()

    for run in (fn, strict(fn, partition=partition)):
        x, w = pair()
        out = run(x, w)
        (g,) = grad(out.sum(), x)
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(g.sum(), [x, w])


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_what_is_handed_over_in_another_layout(partition: str) -> None:
    """A `view` was recorded of it, for the layout that it had then."""

    def fn(w: Tensor) -> Tensor:
        return w.t().sigmoid().reshape(-1).sum()

    found = []
    for run in (fn, strict(fn, partition=partition)):
        w, t = double(3, 3, seed=1), double(seed=2)
        (g,) = grad(run(w * 1), w, t)
        seconds = torch.autograd.grad(g.sin().sum(), [w, t], create_graph=True)
        found.append(torch.autograd.grad(sum(v.sin().sum() for v in seconds), [w, t]))
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)

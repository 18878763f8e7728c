"""Second and third derivatives of programs: dropout, checkpoints, mutation, views, modules, odd dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .common import strict
from .plays import agree, assert_alike, double, grad

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")


def body(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).sin().sum()


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


# randomness


def test_dropout_keeps_its_mask() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout((x * w).exp(), 0.5) * F.dropout(x, 0.3)

    def play(run: Any) -> Any:
        torch.manual_seed(4)
        x, w = pair(20)
        out = run(x, w)
        gx, gw = grad(out, [x, w])
        second = grad(gx, [x, w])
        third = grad(second[0], [x, w])
        return out, gx, gw, second, third, torch.rand(3)

    agree(fn, play, calls=3)


def test_dropout_masks_differ_from_call_to_call() -> None:
    compiled = strict(lambda x: F.dropout(x**3, 0.5))
    x = double(50)
    masks = []
    for _ in range(2):
        (g,) = grad(compiled(x), x)
        (gg,) = grad(g, x)
        assert torch.equal(g == 0, gg == 0)
        masks.append(g == 0)
    assert not torch.equal(*masks)


@pytest.mark.parametrize("reentrant", [False])
def test_checkpoint_around(reentrant: bool) -> None:
    def play(run: Any) -> Any:
        torch.manual_seed(0)
        x, w = pair()
        out = checkpoint(run, x, w, use_reentrant=reentrant)
        (g,) = grad(out, x)
        return g, grad(g, [x, w])

    agree(body, play)
    agree(lambda x, w: F.dropout(x.exp() * w, 0.5) * x, play)


def test_checkpoint_inside() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        inner = checkpoint(lambda t: F.dropout((t * w).exp(), 0.5) * t, x, use_reentrant=False)
        return inner.sin()  # type: ignore[no-any-return]

    def play(run: Any) -> Any:
        torch.manual_seed(0)
        x, w = pair()
        (g,) = grad(run(x, w), x)
        return g, grad(g, [x, w])

    agree(fn, play)


# mutation and views


def test_an_input_changed_inside() -> None:
    def fn(h: Tensor, w: Tensor) -> Tensor:
        h.mul_(w)
        h[0] = h[1].exp()
        return h.sin() * w

    def play(run: Any) -> Any:
        x, w = pair()
        h = x * 2
        out = run(h, w)
        (g,) = grad([out, h * h], x)
        return h, g, grad(g, [x, w])

    agree(fn, play)


def test_a_buffer_changed_inside() -> None:
    def fn(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.detach())
        return x**3 * total

    def play(run: Any) -> Any:
        x, total = double(3), double(3, seed=3, grad=False)
        (g,) = grad(run(x, total), x)
        return g, grad(g, x), total

    agree(fn, play)


def test_views_as_outputs() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        h = (x * w).sin()
        return h.t(), h[0], h.view(-1)[2:], x[1], h.unbind(0)

    def of(which: int) -> Callable[[Any], Any]:
        def play(run: Any) -> Any:
            x, w = pair()
            (g,) = grad(run(x, w)[which], x)
            return g, grad(g, [x, w], allow_unused=True)

        return play

    agree(fn, *(of(i) for i in (0, 1, 2, 4)))


def test_outputs_changed_in_place_afterwards() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        out.mul_(x)
        out[0].sin_()
        (g,) = grad(out, x)
        return g, grad(g, [x, w])

    agree(lambda x, w: (x @ w).sin(), play)


def test_the_gradient_changed_in_place() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        (g,) = grad(run(x, w), x)
        g.mul_(w)
        return g, grad(g, [x, w])

    agree(body, play)


# modules


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Softplus(), nn.Linear(4, 1))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def test_gradient_penalty_of_a_module() -> None:
    torch.manual_seed(0)
    model = Critic().double()

    def play(run: Any) -> Any:
        model.zero_grad()
        x = double(5, 3)
        (g,) = grad(run(x), x)
        ((g.norm(dim=1) - 1) ** 2).mean().backward()
        return [p.grad for p in model.parameters()], x.grad

    agree(model, play)


def test_unrolled_optimization() -> None:
    """Three steps of gradient descent, differentiated with respect to the rate and the start."""

    def play(run: Any) -> Any:
        x, w = pair()
        rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        weights = w
        for _ in range(3):
            (g,) = grad(run(x, weights), weights)
            weights = weights - rate * g
        run(x, weights).backward()
        return rate.grad, w.grad, x.grad

    agree(body, play)


# shapes and dtypes


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 1, 3)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    def play(run: Any) -> Any:
        x, w = double(*shape, seed=1), double(*shape, seed=2)
        (g,) = grad(run(x, w), x)
        return g, grad(g, [x, w])

    agree(lambda x, w: (x * w).exp() * x, play)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def play(run: Any) -> Any:
        x, w = (t.detach().to(dtype).requires_grad_() for t in pair(4))
        (g,) = grad(run(x, w), x)
        return g, grad(g, [x, w])

    agree(lambda x, w: (x * w).sin() * x, play)


def test_mixed_dtypes() -> None:
    def play(run: Any) -> Any:
        x, w = double(4, seed=1).detach().float().requires_grad_(), double(4, seed=2)
        (g,) = grad(run(x, w), x)
        return g, grad(g, [x, w])

    agree(lambda x, w: (x * w).sin() * x.double().exp(), play)


def test_complex_numbers() -> None:
    def play(run: Any) -> Any:
        x, w = (
            torch.complex(double(3, seed=s), double(3, seed=s + 1)).detach().requires_grad_() for s in (1, 3)
        )
        (g,) = torch.autograd.grad(run(x, w), x, torch.full((3,), 1 + 2j, dtype=x.dtype), create_graph=True)
        return g, torch.autograd.grad(g, [x, w], torch.full((3,), 2 - 1j, dtype=x.dtype))

    agree(lambda x, w: x**3 * w.conj() + w.abs() * x, play)


# torch.autograd.functional


def fun(x: Tensor) -> Tensor:
    return ((x.outer(x)).tanh() * x.exp()).sum()


def vector(x: Tensor) -> Tensor:
    return x.cumsum(0).sin() * x.exp()


def two_inputs(x: Tensor, w: Tensor) -> Any:
    return (x * w).sin() * x, w.exp()


X, W, V = (double(3, seed=s, grad=False) for s in (1, 2, 3))
AF = torch.autograd.functional


def X1() -> Tensor:
    return X.clone().requires_grad_()


FUNCTIONAL: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "hessian": (fun, lambda f: AF.hessian(f, X)),
    "hessian, create_graph": (fun, lambda f: AF.hessian(f, X1(), create_graph=True)),
    "hessian, vectorized": (fun, lambda f: AF.hessian(f, X, vectorize=True)),
    "hessian, forward over reverse": (
        fun,
        lambda f: AF.hessian(f, X, vectorize=True, outer_jacobian_strategy="forward-mode"),
    ),
    "hessian of two inputs": (lambda x, w: two_inputs(x, w)[0].sum(), lambda f: AF.hessian(f, (X, W))),
    "jacobian": (vector, lambda f: AF.jacobian(f, X)),
    "jacobian, create_graph": (
        vector,
        lambda f: AF.jacobian(f, X1(), create_graph=True),
    ),
    "jacobian, vectorized": (vector, lambda f: AF.jacobian(f, X, vectorize=True)),
    "jacobian, forward": (vector, lambda f: AF.jacobian(f, X, vectorize=True, strategy="forward-mode")),
    "jacobian of two": (two_inputs, lambda f: AF.jacobian(f, (X, W))),
    "hvp": (fun, lambda f: AF.hvp(f, X, V)),
    "hvp, create_graph": (fun, lambda f: AF.hvp(f, X1(), V, create_graph=True)),
    "vhp": (fun, lambda f: AF.vhp(f, X, V)),
    "vjp": (vector, lambda f: AF.vjp(f, X, V)),
    "jvp": (vector, lambda f: AF.jvp(f, X, V)),
    "jvp, create_graph": (vector, lambda f: AF.jvp(f, X1(), V, create_graph=True)),
    "jvp of two": (two_inputs, lambda f: AF.jvp(f, (X, W), (V, V))),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_autograd_functional(name: str) -> None:
    fn, play = FUNCTIONAL[name]
    agree(fn, play)


def test_strict_jacobian() -> None:
    agree(two_inputs, refused=[lambda f: AF.jacobian(f, (X, W), strict=True)])
    agree(vector, lambda f: AF.jacobian(f, X, strict=True))


def test_a_compiled_gradient_function_is_differentiated() -> None:
    """`compile` around a function that takes a gradient of a compiled function."""
    inner = strict(body)

    def outer(run: Any) -> Callable[..., Any]:
        def gradient(x: Tensor, w: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(run(x, w), x, create_graph=True)
            return g * x

        return gradient

    compiled = strict(outer(inner))
    for _ in range(2):
        results = []
        for run in (outer(body), compiled):
            x, w = pair()
            (g,) = grad(run(x, w), w)
            results.append((g, grad(g, [x, w])))
        assert_alike(*results)

"""Second and third derivatives through a compiled function, taken in all the ways that eager allows.

Values are compared in float64 to 1e-10: the parts of a gradient may be added up in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aheadgrad
from aheadgrad.errors import HigherOrderError

from .plays import agree, double, grad

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")


def body(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).sin().sum()


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


# ways of asking


def test_orders_one_to_four() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        found = [run(x, w)]
        for _ in range(4):
            found += grad(found[-1], x)
        return found

    agree(body, play)


def test_each_order_again_and_again() -> None:
    """Orders asked for in no order: plain, second, plain, third, first with a graph that nobody uses."""

    def order(n: int) -> Callable[[Any], Any]:
        def play(run: Any) -> Any:
            x, w = pair()
            out = run(x, w)
            for _ in range(n):
                (out,) = grad(out, x)
            return grad(out, [x, w], create_graph=False)

        return play

    agree(body, order(0), order(1), order(0), order(2), order(1), calls=2)


def test_backward_with_create_graph() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        run(x, w).backward(create_graph=True)
        first = x.grad, w.grad
        total = x.grad.pow(2).sum() + w.grad.sin().sum()  # type: ignore[union-attr]
        x.grad = w.grad = None
        total.backward()
        return first, x.grad, w.grad

    agree(body, play)


def test_backward_accumulates_into_a_differentiable_gradient() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        run(x, w).backward(create_graph=True)
        run(x, w).backward(create_graph=True)
        return grad(x.grad, [x, w]), x.grad

    agree(body, play)


def test_backward_with_inputs() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        run(x, w).backward(create_graph=True, inputs=[x])
        assert w.grad is None
        first, x.grad = x.grad, None
        first.sum().backward(inputs=[w])
        return x.grad, w.grad

    agree(body, play)


def test_mixed_derivatives() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        gx, gw = grad(run(x, w), [x, w])
        xw = grad(gx, w)[0]
        wx = grad(gw, x)[0]
        return gx, gw, xw, wx, grad(xw * wx, [x, w]), grad(gx * gw, [x, w], create_graph=False)

    agree(body, play)


def test_all_at_once() -> None:
    """The function's value and its gradient in one loss."""

    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        (g,) = grad(out, x)
        (out + g.pow(2).sum() + (g * x).sum()).backward()
        return x.grad, w.grad

    agree(body, play)


def test_the_gradient_goes_into_another_compiled_call() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        (g,) = grad(run(x, w), x)
        out = run(g, w)
        (g2,) = grad(out, x)
        return out, g2, grad(g2, [x, w], create_graph=False)

    agree(body, play)


def test_calls_one_after_the_other_and_side_by_side() -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh() * x

    def play(run: Any) -> Any:
        x, w = pair()
        out = run(run(x, w) * 2, w) + run(x.sin(), w + 1)
        (g,) = grad(out, x)
        return g, grad(g, [x, w])

    agree(layer, play)


def test_hessian_vector_products() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        v = double(3, 3, seed=5, grad=False)
        (g,) = grad(run(x, w), x)
        return [torch.autograd.grad(g, x, v * k, retain_graph=True) for k in range(3)]

    agree(body, play)


def test_gradients_with_respect_to_tangents() -> None:
    """The trick by which reverse mode computes a Jacobian-vector product."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh() * x

    def play(run: Any) -> Any:
        x, w = pair()
        t, v = double(3, 3, seed=7), double(3, 3, seed=8, grad=False)
        out = run(x, w)
        gx, gw = torch.autograd.grad(out, [x, w], t, create_graph=True)
        forward = torch.autograd.grad(gx, t, v, create_graph=True)
        return gx, gw, forward, grad(gw, [t, x, w]), grad(forward, [x, w], create_graph=False)

    agree(layer, play)


def test_a_tangent_that_depends_on_the_input() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        (g,) = torch.autograd.grad(out, x, (x * w).sum().sin(), create_graph=True)
        return g, grad(g, [x, w])

    agree(body, play)


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.t(),
        lambda t: t[0].expand(3, 3),
        lambda t: t.sum().expand(3, 3),
        lambda t: t.repeat(2, 2)[::2, ::2],
    ],
)
def test_tangents_of_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        t = double(3, 3, seed=7)
        (g,) = torch.autograd.grad(run(x, w), x, layout(t), create_graph=True)
        return g, grad(g * g, [x, w, t]), torch.autograd.grad(run(x, w), x, layout(t))

    agree(lambda x, w: (x @ w).tanh() * x, play)


def test_is_grads_batched() -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return ((x * w).tanh() * x).cumsum(0)

    def first(run: Any) -> Any:
        x, w = pair(3)
        (jacobian,) = torch.autograd.grad(run(x, w), x, torch.eye(3).double(), is_grads_batched=True)
        return jacobian

    def second(run: Any) -> Any:
        x, w = pair(3)
        (g,) = grad(run(x, w), x)
        return torch.autograd.grad(g, [x, w], torch.eye(3).double(), is_grads_batched=True)

    def both(run: Any) -> Any:
        x, w = pair(3)
        (jacobian,) = torch.autograd.grad(
            run(x, w), x, torch.eye(3).double(), is_grads_batched=True, create_graph=True
        )
        return jacobian, grad(jacobian, [x, w])

    agree(layer, first, second, both)


# parts


def test_part_of_the_outputs() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        h = (x * w).sin()
        return h * x, h.exp(), w**3

    def of(*which: int) -> Callable[[Any], Any]:
        def play(run: Any) -> Any:
            x, w = pair(3)
            outs = run(x, w)
            (g,) = grad([outs[i] for i in which], w)
            return g, grad(g, [x, w], allow_unused=True)

        return play

    agree(fn, of(0), of(1), of(2), of(0, 2), of(0, 1, 2))


def test_one_output_first_and_another_later() -> None:
    """The gradient of one output, and then a loss of that gradient and another output of the same call."""

    def fn(x: Tensor, w: Tensor) -> Any:
        h = (x * w).sin()
        return h * x, h.exp()

    def play(run: Any) -> Any:
        x, w = pair(3)
        a, b = run(x, w)
        (g,) = grad(a, x)
        (g * b).sum().backward()
        return x.grad, w.grad

    agree(fn, play)


def test_second_order_reaches_only_some_inputs() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x * w + b.exp()).sum()

    def play(run: Any) -> Any:
        x, w = pair(3)
        b = double(3, seed=3)
        gx, gw, gb = grad(run(x, w, b), [x, w, b])
        found = [gx, gw, gb, gx.requires_grad, gb.requires_grad]
        for g in (gx, gw, gb):
            found.append(grad(g, [x, w, b], allow_unused=True))
        return found

    agree(fn, play)


def test_unused_at_second_order() -> None:
    def play(**options: Any) -> Callable[[Any], Any]:
        def run_it(run: Any) -> Any:
            x, w = pair(3)
            (g,) = grad(run(x, w), x)
            return torch.autograd.grad(g.sum(), [x, w], **options)

        return run_it

    agree(
        lambda x, w: (x**3).sum() + w.sum(),
        play(allow_unused=True),
        play(materialize_grads=True),
        refused=[play()],
    )


def test_a_linear_function_has_no_second_derivative() -> None:
    def play(run: Any) -> Any:
        x, w = pair(3)
        (g,) = grad(run(x, w), x)
        return g, g.requires_grad, g.grad_fn is None

    def further(run: Any) -> Any:
        x, w = pair(3)
        (g,) = grad(run(x, w), x)
        return grad(g, x)

    agree(lambda x, w: (x * 3 + w).sum(), play, refused=[further])


def test_inputs_without_gradient() -> None:
    def play(run: Any) -> Any:
        x, w = double(3, 3, seed=1, grad=False), double(3, 3, seed=2)
        (g,) = grad(run(x, w), w)
        return g, grad(g, w)

    agree(body, play)


def test_closed_over_tensors() -> None:
    w = double(3, 3, seed=2)

    def play(run: Any) -> Any:
        x = double(3, 3, seed=1)
        gx, gw = grad(run(x), [x, w])
        return gx, gw, grad(gx * gw, [x, w])

    agree(lambda x: body(x, w), play)


def test_the_same_tensor_given_twice() -> None:
    def play(run: Any) -> Any:
        x = double(3, 3)
        (g,) = grad(run(x, x), x)
        return g, grad(g, x)

    agree(body, play)


def test_outputs_that_are_no_floats() -> None:
    def fn(x: Tensor) -> Any:
        values, places = (x**3).sort()
        return values, places, x > 0, 3, None

    def play(run: Any) -> Any:
        x = double(4)
        (g,) = torch.autograd.grad(run(x)[0], x, double(4, seed=3), create_graph=True)
        return g, grad(g, x)

    agree(fn, play)


def test_detached_parts_and_no_grad_regions() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * w).exp()
        return (x.detach() * w).sin() * scale + x**3 * scale.detach()

    def play(run: Any) -> Any:
        x, w = pair(3)
        gx, gw = grad(run(x, w), [x, w])
        return gx, gw, grad(gx + gw, [x, w])

    agree(fn, play)


def test_statistics_of_norms_are_differentiated() -> None:
    """What a norm saves is a function of its input, although it is an output without gradient."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (F.layer_norm(x, (3,), w[0]) * F.batch_norm(x, None, None, training=True) * w).sum()

    def play(run: Any) -> Any:
        x, w = pair()
        gx, gw = grad(run(x, w), [x, w])
        return gx, gw, grad(gx.pow(2), [x, w]), grad(gw, x)

    agree(fn, play)


# giving it up


def test_first_order_only() -> None:
    """`any_order=False`: first derivatives as always, of returned intermediates too; others are refused."""

    def layer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ w).tanh()
        return h, (h * x).sin()

    compiled = aheadgrad.compile(layer, fallback="error", any_order=False, frontend="trace")
    for order in ([0], [1], [0, 1]):
        results = []
        for run in (layer, compiled):
            x, w = pair()
            outs = run(x * 1, w)
            results.append(torch.autograd.grad([outs[k].sum() for k in order], [x, w], retain_graph=True))
        torch.testing.assert_close(results[0], results[1])
    x, w = pair()
    with pytest.raises(HigherOrderError, match="any_order=False"):
        torch.autograd.grad(compiled(x, w)[1].sum(), x, create_graph=True)

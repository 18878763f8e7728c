"""`torch.func` transforms and forward-mode duals over compiled functions and modules, alone and nested.

Each play runs over a function that was never called, and over one that a plain call has compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from .common import strict
from .plays import Play, assert_alike, double, ending

# eager's own: forward mode scripts a few functions when it is first used, linearize makes a graph
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]


def over(fn: Callable[..., Any], play: Play, *warm_with: Tensor, rtol: float = 1e-10) -> None:
    """A play over a compiled function that was never called, and over one that a plain call has compiled."""
    expected = ending(play, fn)
    if isinstance(expected, Exception):
        raise expected
    cold = strict(fn)
    for call in range(2):
        assert_alike(expected, ending(play, cold), f"cold, call {call}", rtol)
    warm = strict(fn)

    def plainly(run: Callable[..., Any]) -> Any:
        return run(*(t.clone() for t in warm_with))

    for call in range(2):
        assert_alike(plainly(fn), ending(plainly, warm), f"plain call {call}", rtol)
        assert_alike(expected, ending(play, warm), f"warm, call {call}", rtol)


def vector(x: Tensor) -> Tensor:
    return x.cumsum(-1).sin() * x.exp()


def scalar(x: Tensor) -> Tensor:
    return vector(x).sum()


def two(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x).sum(-1)


def several(x: Tensor, w: Tensor) -> Any:
    return {"product": x * w, "parts": ((x + w).sin(), w.exp())}


X, W, V = (double(3, seed=s, grad=False) for s in (1, 2, 3))
XX, WW = double(4, 3, seed=4, grad=False), double(3, 3, seed=5, grad=False)
XXX = double(2, 4, 3, seed=6, grad=False)

ONE: dict[str, tuple[Callable[..., Any], Tensor, Play]] = {
    "grad": (scalar, X, lambda f: grad(f)(X)),
    "grad_and_value": (scalar, X, lambda f: grad_and_value(f)(X)),
    "grad of grad": (scalar, X, lambda f: grad(lambda x: grad(f)(x).sum())(X)),
    "third derivative": (scalar, X, lambda f: grad(lambda x: grad(lambda y: grad(f)(y).sum())(x).sum())(X)),
    "vjp": (vector, X, lambda f: vjp(f, X)[1](V)),
    "vjp twice": (vector, X, lambda f: [vjp(f, X)[1](V * k) for k in range(2)]),
    "jvp": (vector, X, lambda f: jvp(f, (X,), (V,))),
    "jvp of jvp": (vector, X, lambda f: jvp(lambda x: jvp(f, (x,), (V,))[1], (X,), (V,))),
    "jvp of grad": (scalar, X, lambda f: jvp(grad(f), (X,), (V,))),
    "grad of jvp": (vector, X, lambda f: grad(lambda x: jvp(f, (x,), (V,))[1].sum())(X)),
    "jacrev": (vector, X, lambda f: jacrev(f)(X)),
    "jacrev, chunked": (vector, X, lambda f: jacrev(f, chunk_size=2)(X)),
    "jacfwd": (vector, X, lambda f: jacfwd(f)(X)),
    "jacfwd of jacrev": (vector, X, lambda f: jacfwd(jacrev(f))(X)),
    "jacrev of jacrev": (vector, X, lambda f: jacrev(jacrev(f))(X)),
    "hessian": (scalar, X, lambda f: hessian(f)(X)),
    "linearize": (vector, X, lambda f: [linearize(f, X)[0], linearize(f, X)[1](V)]),
    "functionalize": (vector, X, lambda f: functionalize(f)(X)),
    "vmap": (vector, X, lambda f: vmap(f)(XX)),
    "vmap of vmap": (vector, X, lambda f: vmap(vmap(f))(XXX)),
    "vmap, other dimensions": (vector, X, lambda f: vmap(f, in_dims=1, out_dims=1)(XX.t())),
    "vmap, chunked": (vector, X, lambda f: vmap(f, chunk_size=3)(XX)),
    "vmap of grad": (scalar, X, lambda f: vmap(grad(f))(XX)),
    "vmap of hessian": (scalar, X, lambda f: vmap(hessian(f))(XX)),
    "vmap of jvp": (vector, X, lambda f: vmap(lambda x: jvp(f, (x,), (V,))[1])(XX)),
    "vmap of vjp": (vector, X, lambda f: vmap(lambda x: vjp(f, x)[1](V)[0])(XX)),
    "grad of vmap": (vector, X, lambda f: grad(lambda x: vmap(f)(x).sum())(XX)),
    "jacrev of vmap": (vector, X, lambda f: jacrev(vmap(f))(XX)),
    "jvp of vmap": (vector, X, lambda f: jvp(vmap(f), (XX,), (XX.cos(),))),
}


@pytest.mark.parametrize("name", ONE)
def test_one_argument(name: str) -> None:
    fn, x, play = ONE[name]
    over(fn, play, x)


TWO: dict[str, Play] = {
    "grad of the second": lambda f: grad(lambda x, w: f(x, w).sum(), argnums=1)(XX, WW),
    "grad of both": lambda f: grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))(XX, WW),
    "jacrev of both": lambda f: jacrev(f, argnums=(0, 1))(XX, WW),
    "jacfwd of the second": lambda f: jacfwd(f, argnums=1)(XX, WW),
    "hessian of both": lambda f: hessian(lambda x, w: f(x, w).sum(), argnums=(0, 1))(XX, WW),
    "vmap over the first": lambda f: vmap(f, in_dims=(0, None))(XXX, WW),
    "vmap over the second": lambda f: vmap(f, in_dims=(None, 0))(XX, torch.stack([WW, WW.t()])),
    "vmap over both": lambda f: vmap(f, in_dims=(0, 2), out_dims=1)(XXX, torch.stack([WW, WW.t()], dim=-1)),
    "gradient of each sample": lambda f: vmap(grad(f, argnums=1), in_dims=(0, None))(XX, WW),
    "ensemble of gradients": lambda f: vmap(
        vmap(grad(f, argnums=(0, 1)), in_dims=(0, None)), in_dims=(None, 0)
    )(XX, torch.stack([WW, WW.t()])),
    "vjp": lambda f: vjp(f, XX, WW)[1](XX[:, 0]),
    "jvp": lambda f: jvp(f, (XX, WW), (XX.cos(), WW.sin())),
}


@pytest.mark.parametrize("name", TWO)
def test_two_arguments(name: str) -> None:
    over(two, TWO[name], XX, WW)


SEVERAL: dict[str, Play] = {
    "vmap": lambda f: vmap(f, in_dims=(0, None))(XX, W),
    "vmap with other dimensions out": lambda f: vmap(
        f, in_dims=(0, None), out_dims={"product": 1, "parts": (0, None)}
    )(XX, W),
    "jacrev": lambda f: jacrev(f)(X, W),
    "jacfwd": lambda f: jacfwd(f, argnums=1)(X, W),
    "vjp": lambda f: vjp(f, X, W)[1]({"product": V, "parts": (V, V * 2)}),
    "jvp": lambda f: jvp(f, (X, W), (V, V)),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_outputs(name: str) -> None:
    over(several, SEVERAL[name], X, W)


def test_has_aux() -> None:
    def fn(x: Tensor) -> Any:
        return vector(x).sum(), x.detach() * 2

    over(fn, lambda f: grad(f, has_aux=True)(X), X)
    over(fn, lambda f: vjp(f, X, has_aux=True)[2], X)


def test_keyword_and_python_arguments() -> None:
    def fn(x: Tensor, *, scale: float = 1.0, power: int = 2) -> Tensor:
        return (x**power * scale).sum()

    over(fn, lambda f: [grad(f)(X, scale=s, power=p) for s in (2.0, 3.0) for p in (2, 3)], X)


# programs


def writes(x: Tensor) -> Tensor:
    h = x * 2
    h[..., 0].mul_(3)
    h.view(-1)[1:].sin_()
    return h * x


def test_writes_in_place_inside() -> None:
    over(writes, lambda f: [vmap(f)(XX), jacrev(f)(X), grad(lambda x: f(x).sum())(X)], X)


def test_an_argument_changed_in_place() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        y.add_(x)
        return y * 2

    def play(f: Any) -> Any:
        y = torch.zeros(4, 3, dtype=torch.float64)
        return vmap(f)(XX, y), y

    over(fn, play, X, torch.zeros(3, dtype=torch.float64))


def test_closed_over_tensors() -> None:
    weight = double(3, seed=9)

    def fn(x: Tensor) -> Tensor:
        return (x * weight).sin().sum(-1)

    def gradient_of_the_closure(f: Any) -> Any:
        weight.grad = None
        vmap(f)(XX).sum().backward()
        return weight.grad

    over(fn, lambda f: vmap(f)(XX), X)
    over(fn, lambda f: vmap(grad(f))(XX), X)
    over(fn, gradient_of_the_closure, X)


def test_plain_backward_through_a_transform() -> None:
    def play(f: Any) -> Any:
        x = XX.clone().requires_grad_()
        vmap(f)(x).pow(2).sum().backward()
        y = X.clone().requires_grad_()
        jacrev(f)(y).pow(2).sum().backward()
        return x.grad, y.grad

    over(vector, play, X)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_with_randomness(randomness: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + torch.rand(3, dtype=torch.float64)

    def play(f: Any) -> Any:
        torch.manual_seed(0)
        return vmap(f, randomness=randomness)(XX), torch.rand(2)

    expected = play(fn)
    compiled = strict(fn)
    assert_alike(expected, play(compiled))
    compiled(X)
    assert_alike(expected, play(compiled))


def test_vmap_refuses_randomness() -> None:
    def fn(x: Tensor) -> Tensor:
        return x + torch.rand(3)

    compiled = strict(fn)
    compiled(X)
    assert_alike(ending(lambda f: vmap(f)(XX), fn), ending(lambda f: vmap(f)(XX), compiled))


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 4 * x**2  # not the derivative, so that it shows who computed it

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * 5 * x**2


def cubes(x: Tensor) -> Tensor:
    return Cube.apply(x).sum()


@pytest.mark.parametrize(
    "play",
    [
        lambda f: grad(f)(X),
        lambda f: vmap(f)(XX),
        lambda f: vmap(grad(f))(XX),
        lambda f: jvp(f, (X,), (V,)),
        lambda f: hessian(f)(X),
    ],
)
def test_custom_functions(play: Play) -> None:
    over(cubes, play, X)


# modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh()) * self.scale
        return out


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


MODULE: dict[str, Play] = {
    "vmap": lambda m: vmap(m)(XX),
    "jacrev": lambda m: jacrev(m)(X),
    "functional_call": lambda m: functional_call(m, {n: p * 2 for n, p in state(m).items()}, (X,)),
    "grad of parameters": lambda m: grad(lambda p: functional_call(m, p, (XX,)).pow(2).sum())(state(m)),
    "gradient of each sample": lambda m: vmap(
        grad(lambda p, x: functional_call(m, p, (x,)).pow(2).sum()), in_dims=(None, 0)
    )(state(m), XX),
    "jvp of parameters": lambda m: jvp(lambda p: functional_call(m, p, (XX,)), (state(m),), (state(m),)),
    "hessian of parameters": lambda m: hessian(
        lambda w: functional_call(m, {**state(m), "second.weight": w}, (X,)).pow(2).sum()
    )(state(m)["second.weight"]),
}


@pytest.mark.parametrize("name", MODULE)
@pytest.mark.parametrize("warm", [False, True])
def test_modules(name: str, warm: bool) -> None:
    model = net()
    compiled = strict(copy.deepcopy(model))
    if warm:
        assert_alike(model(X), compiled(X))
    for _ in range(2):
        assert_alike(ending(MODULE[name], model), ending(MODULE[name], compiled), name)
    assert_alike(model(X), compiled(X))
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_an_ensemble_of_compiled_modules() -> None:
    models = [net() for _ in range(3)]
    with torch.no_grad():
        for i, model in enumerate(models):
            for p in model.parameters():
                p.add_(i * 0.1)
    expected = torch.stack([model(XX) for model in models])
    compiled = strict(net())
    compiled(XX)
    params, buffers = stack_module_state(models)

    def one(p: Any, b: Any, x: Tensor) -> Any:
        return functional_call(compiled, (p, b), (x,))

    assert_alike(expected.detach(), vmap(one, in_dims=(0, 0, None))(params, buffers, XX).detach())


def test_functional_call_with_gradients() -> None:
    """Other parameters for one call, differentiated by plain autograd."""

    def play(m: Any) -> Any:
        params = {n: (p * 2).requires_grad_() for n, p in state(m).items()}
        functional_call(m, params, (XX,)).pow(2).sum().backward()
        return [p.grad for p in params.values()], [p.grad for p in m.parameters()]

    model, compiled = net(), strict(net())
    for _ in range(2):
        assert_alike(ending(play, model), ending(play, compiled))
        assert_alike(model(X), compiled(X))


# forward mode


def test_duals() -> None:
    def play(f: Any) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(X, V)
            out = forward_ad.unpack_dual(f(dual))
            return out.primal, out.tangent

    over(vector, play, X)


def test_duals_with_a_backward() -> None:
    """Forward over reverse: a tangent that is differentiated."""

    def play(f: Any) -> Any:
        x = X.clone().requires_grad_()
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(f(forward_ad.make_dual(x, V)))
            assert out.tangent is not None
            return torch.autograd.grad(out.tangent.sum(), x)

    over(vector, play, X)


def test_duals_through_the_backward() -> None:
    """Reverse, then forward: the backward of a plain call sees a dual tangent."""

    def play(f: Any) -> Any:
        x = X.clone().requires_grad_()
        out = f(x)
        with forward_ad.dual_level():
            t = forward_ad.make_dual(V, W)
            (g,) = torch.autograd.grad(out, x, t)
            return forward_ad.unpack_dual(g).tangent

    over(vector, play, X)


def test_duals_through_parameters() -> None:
    model = net()
    compiled = strict(copy.deepcopy(model))
    compiled(X)

    def play(m: Any) -> Any:
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(p, p.cos()) for n, p in state(m).items()}
            out = forward_ad.unpack_dual(functional_call(m, duals, (X,)))
            return out.primal, out.tangent

    assert_alike(ending(play, model), ending(play, compiled))


# the backward under a transform


def test_vmap_over_the_backward() -> None:
    """The call is outside of the transform, its backward inside."""

    def play(f: Any) -> Any:
        x = X.clone().requires_grad_()
        out = f(x)
        return vmap(lambda t: torch.autograd.grad(out, x, t, retain_graph=True)[0])(
            torch.eye(3, dtype=torch.float64)
        )

    over(vector, play, X)


def test_is_grads_batched() -> None:
    def play(f: Any) -> Any:
        x, w = XX.clone().requires_grad_(), WW.clone().requires_grad_()
        tangents = torch.eye(4, dtype=torch.float64)
        return torch.autograd.grad(f(x, w), [x, w], tangents, is_grads_batched=True)

    over(two, play, XX, WW)


def test_is_grads_batched_of_some_outputs() -> None:
    def play(f: Any) -> Any:
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        outs = f(x, w)
        return torch.autograd.grad(
            [outs["product"], outs["parts"][1]], [x, w], [torch.eye(3).double()] * 2, is_grads_batched=True
        )

    over(several, play, X, W)


# compiled inside compiled


def test_a_compiled_function_inside_a_compiled_function() -> None:
    inner = strict(vector)

    def outer(x: Tensor) -> Tensor:
        return inner(x * 2) * inner(x)

    def eager(x: Tensor) -> Tensor:
        return vector(x * 2) * vector(x)

    compiled = strict(outer)
    for _ in range(2):
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        compiled(x).sum().backward()
        eager(y).sum().backward()
        assert_alike(y.grad, x.grad)
    assert_alike(jacrev(eager)(X), jacrev(compiled)(X))
    assert_alike(vmap(eager)(XX), vmap(compiled)(XX))
    inner(X)
    assert_alike(hessian(lambda x: eager(x).sum())(X), hessian(lambda x: compiled(x).sum())(X))


def test_a_compiled_module_inside_a_compiled_module() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.gain = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * self.gain
            return out

    eager, compiled = Outer(net()), strict(Outer(strict(net())))
    for _ in range(2):
        for m in (eager, compiled):
            m.zero_grad()
            m(XX).pow(2).sum().backward()
        assert_alike([p.grad for p in eager.parameters()], [p.grad for p in compiled.parameters()])
    assert_alike(vmap(eager)(XX), vmap(compiled)(XX))


def test_a_transform_of_a_compiled_function_inside_a_compiled_function() -> None:
    inner = strict(scalar)
    inner(X)

    def outer(x: Tensor) -> Any:
        return vmap(grad(inner))(x), jacrev(inner)(x[0]), torch.func.hessian(inner)(x[1])

    def eager(x: Tensor) -> Any:
        return vmap(grad(scalar))(x), jacrev(scalar)(x[0]), torch.func.hessian(scalar)(x[1])

    compiled = strict(outer)
    for _ in range(2):
        assert_alike(eager(XX), compiled(XX))


COMPILED: dict[str, tuple[Callable[[Any], Any], Tensor]] = {
    "vmap of grad": (lambda f: vmap(grad(f)), XX),
    "vmap of hessian": (lambda f: vmap(hessian(f)), XX),
    "hessian": (hessian, X),
    "jacrev": (jacrev, X),
    "jacfwd": (jacfwd, X),
    "functionalize": (functionalize, X),
    "functionalize of grad": (lambda f: functionalize(grad(f)), X),
    "functionalize of vmap": (lambda f: functionalize(vmap(f)), XX),
    "vmap of functionalize": (lambda f: vmap(functionalize(f)), XX),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_transforms(name: str) -> None:
    """`compile(vmap(grad(f)))` and friends."""
    make, x = COMPILED[name]
    eager, compiled = make(scalar), strict(make(scalar))
    for _ in range(2):
        assert_alike(eager(x), ending(lambda f: f(x), compiled))

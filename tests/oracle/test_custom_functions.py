"""Custom `autograd.Function`, hooks and derivatives inside the function; transforms inside and over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aheadgrad.testing import Inputs

from .common import assert_equal, default, leaf, leaves, one, same, same_by_default, strict, two

ALL = ("all", "each", "sequence", "twice")


class Cube(Function):
    """Saves for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x * x + 1  # not the derivative, so that we know who was asked


class SavesOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return g * out * 2


class KeepsOnCtx(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, name: str, nothing: None) -> Tensor:
        ctx.scale = scale
        ctx.mask = x > 0
        ctx.name = name
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.scale * ctx.mask * len(ctx.name), None, None, None


class Needs(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        ga = g * b * 2 if ctx.needs_input_grad[0] else None
        gb = g * a * 3 if ctx.needs_input_grad[1] else None
        return ga, gb


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 5


class NotDifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        values, index = x.sort()
        ctx.mark_non_differentiable(index)
        floor = x.floor()
        ctx.mark_non_differentiable(index, floor)
        ctx.save_for_backward(index)
        return values, index, floor

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_rest: Any) -> Tensor:
        (index,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(0, index, g)


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        if a is None:
            return b * 100  # type: ignore[operator]
        if b is None:
            return a * 200
        return a + b


class Materialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return a * 7 + b + 1


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 4


class WithSetup(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, power: int) -> Any:
        return x**power, x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * ctx.power * x ** (ctx.power - 1) + h * x.cos() * 2, None


class ReturnsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class ReturnsView(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.view(3) * 3


class NoneGrad(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class InnerGrad(Function):
    """Differentiates inside its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin() * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (found,) = torch.autograd.grad((y.sin() * y * g).sum(), y)
        return found


def apply(function: Any, *rest: Any) -> Callable[[Tensor], Any]:
    return lambda x: function.apply(x.sin(), *rest)


@pytest.mark.parametrize(
    "fn",
    [
        apply(Cube),
        apply(SavesOutput),
        apply(KeepsOnCtx, 2.0, "name", None),
        apply(Dirty),
        apply(NotDifferentiable),
        apply(Unmaterialized),
        apply(Materialized),
        apply(Once),
        apply(WithSetup, 3),
        apply(ReturnsInput),
        apply(ReturnsView),
        apply(InnerGrad),
        lambda x: Cube.apply(Cube.apply(x)),
        lambda x: Cube.apply(x),
        lambda x: ReturnsInput.apply(x),
        lambda x: ReturnsView.apply(x),
        lambda x: Unmaterialized.apply(x)[0],
    ],
)
def test_context_features(fn: Callable[[Tensor], Any]) -> None:
    same(fn, one(3), backward=ALL)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_needs_input_grad(wanted: tuple[bool, bool]) -> None:
    same(
        lambda a, b: Needs.apply(a, b),
        lambda: leaves(*(leaf(3, seed=i, grad=g) for i, g in enumerate(wanted))),
        backward=ALL,
    )


def test_a_gradient_of_none() -> None:
    same(lambda a, b: NoneGrad.apply(a, b), two(3))


def test_mark_dirty_of_an_input() -> None:
    def make() -> Inputs:
        x = leaf(3)
        return Inputs((x * 1,), leaves=[x])

    same(lambda x: Dirty.apply(x), make)
    same(lambda x: Dirty.apply(x), one(3, grad=False))


def test_closed_over_tensor_in_a_custom_function() -> None:
    w = torch.ones(3) * 2

    class Scale(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * w * 10

    def fn(x: Tensor) -> Tensor:
        return Scale.apply(x)  # type: ignore[no-any-return]

    compiled = same(fn, one(3))
    w.mul_(2)
    x = leaf(3)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, w * 10)  # type: ignore[arg-type]


def test_a_parameter_closed_over_by_a_custom_function() -> None:
    w = leaf(3, seed=4)

    class Scale(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * w

    def fn(x: Tensor) -> Tensor:
        return Scale.apply(x)  # type: ignore[no-any-return]

    same_by_default(fn, one(3))


def test_a_backward_that_writes_to_a_closed_over_tensor() -> None:
    seen = torch.zeros(3)

    class Log(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.add_(g)
            return g

    compiled = default(lambda x: Log.apply(x))
    for i in range(1, 4):
        compiled(leaf(3)).sum().backward()
        assert torch.equal(seen, torch.full((3,), float(i)))


def test_a_backward_with_python_control_flow_on_values_is_told() -> None:
    class Branch(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2 if g.sum() > 0 else g

    compiled = strict(lambda x: Branch.apply(x))
    x = leaf(3)
    with pytest.raises(RuntimeError, match=r"(?s)value.*test_custom_functions"):
        compiled(x).sum().backward()


# derivatives inside


def test_grad_inside() -> None:
    def fn(x: Tensor) -> Any:
        y = (x.sin() * x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return y, g * 2

    same(fn, one(3))


def test_grad_inside_without_create_graph() -> None:
    def fn(x: Tensor) -> Any:
        (g,) = torch.autograd.grad((x.sin() * x).sum(), x)
        return x * g, g

    same(fn, one(3))


def test_gradient_penalty() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).tanh().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (g.norm(dim=1) - 1).pow(2).mean()

    same(fn, two(3, 3))


def test_grad_inside_of_detached() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(y.exp().sum(), y)
        return x - g

    same(fn, one(3))
    compiled = strict(fn)
    with torch.no_grad():
        assert torch.equal(compiled(leaf(3)), fn(leaf(3)))


def test_backward_inside() -> None:
    def fn(x: Tensor) -> Any:
        y = x.detach().requires_grad_()
        (y.sin() * y).sum().backward()
        return x * y.grad

    same_by_default(fn, one(3))


def test_backward_inside_reaches_the_arguments() -> None:
    def fn(x: Tensor) -> Tensor:
        loss = (x.sin() * x).sum()
        loss.backward()
        return loss.detach()

    expected, found = leaf(3), leaf(3)
    compiled = default(fn)
    for i in range(3):
        a, b = fn(expected), compiled(found)
        assert torch.equal(a, b)
        assert found.grad is not None, i
        torch.testing.assert_close(expected.grad, found.grad)


def test_backward_inside_reaches_a_module() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    optimizer = {id(m): torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)}

    def train(m: Any) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            loss = m(x).pow(2).sum()
            loss.backward()
            return loss.detach()

        return fn

    eager, compiled = train(model), default(train(other))
    x = leaf(4, 3, grad=False)
    for _ in range(3):
        assert torch.equal(eager(x), compiled(x))
        for m in (model, other):
            optimizer[id(m)].step()
            optimizer[id(m)].zero_grad()
    assert torch.equal(model.weight, other.weight)


def test_reading_grad_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.grad is None else x * 3 + x.grad

    compiled = default(fn)
    x = leaf(3)
    assert torch.equal(compiled(x), x * 2)
    x.grad = torch.ones(3)
    assert torch.equal(compiled(x), x * 3 + 1)
    x.grad = torch.ones(3) * 2
    assert torch.equal(compiled(x), x * 3 + 2)


def test_an_optimizer_step_inside() -> None:
    def fn(w: Tensor, g: Tensor) -> None:
        with torch.no_grad():
            w.sub_(0.1 * g)

    same(fn, lambda: leaves(leaf(3), leaf(3, seed=1, grad=False)))


# hooks inside


def test_tensor_hooks_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        h.register_hook(lambda g: g * 3)
        return h * 2

    same(fn, one(3), backward=ALL)


def test_a_hook_on_the_argument_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x * 1
        h.register_hook(lambda g: g.clamp(max=0.5))
        return h.exp()

    same(fn, one(3))


def test_retain_grad_inside() -> None:
    def fn(x: Tensor) -> Any:
        h = x.sin()
        h.retain_grad()
        return h, h * 2

    def play(run: Any) -> Any:
        x = leaf(3)
        h, out = run(x)
        out.sum().backward()
        return x.grad, h.grad

    assert_equal(play(fn), play(default(fn)))


def test_a_hook_on_a_leaf_argument_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        x.register_hook(lambda g: g * 3)
        return x * 2

    def play(run: Any) -> Any:
        x = leaf(3)
        run(x).sum().backward()
        return x.grad

    assert_equal(play(fn), play(strict(fn)))


# transforms inside


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.func.grad(lambda t: (t.sin() * t).sum())(x) * 2,
        lambda x: torch.func.vmap(lambda t: t.sin() * t.sum())(x.view(3, 1)),
        lambda x: torch.func.jvp(lambda t: t.sin(), (x,), (torch.ones(3),)),
        lambda x: torch.func.jacrev(lambda t: t.sin() * t.sum())(x),
        lambda x: torch.func.jacfwd(lambda t: t.sin() * t.sum())(x),
        lambda x: torch.func.hessian(lambda t: (t.sin() * t).sum())(x),
        lambda x: torch.func.vjp(lambda t: t.sin(), x)[1](torch.ones(3))[0] * x,
        lambda x: torch.func.vmap(torch.func.grad(lambda t: (t**3).sum()))(x.view(3, 1)),
        lambda x: torch.func.grad_and_value(lambda t: (t.sin() * t).sum())(x),
        lambda x: torch.func.vmap(lambda t: t * x)(x.view(3, 1).expand(3, 3)),
        lambda x: torch.vmap(lambda t: t + torch.rand(()), randomness="different")(x),
    ],
)
def test_transforms_inside(fn: Callable[[Tensor], Any]) -> None:
    same(fn, one(3))


def test_forward_mode_inside() -> None:
    import torch.autograd.forward_ad as fwAD

    def fn(x: Tensor) -> Any:
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, torch.ones(3))
            return fwAD.unpack_dual(dual.sin()).tangent

    same(fn, one(3))


def test_per_sample_gradients_of_a_module() -> None:
    model = torch.nn.Linear(3, 1)
    params = dict(model.named_parameters())

    def loss(p: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (x,)).pow(2).sum()

    def fn(p: Any, x: Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(p, x)

    compiled = strict(fn)
    x = leaf(4, 3)
    detached = {k: v.detach() for k, v in params.items()}
    for _ in range(2):
        assert_equal(fn(detached, x), compiled(detached, x))


# transforms over


def _inner(x: Tensor) -> Tensor:
    return (x.sin() * x).sum(-1)


TRANSFORMS: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "grad": lambda f: torch.func.grad(lambda t: f(t).sum()),
    "vmap": torch.func.vmap,
    "vmap grad": lambda f: torch.func.vmap(torch.func.grad(f)),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[0],
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.hessian(lambda t: f(t).sum()),
    "linearize": lambda f: lambda x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "functionalize": torch.func.functionalize,
    "jacobian": lambda f: lambda x: torch.autograd.functional.jacobian(f, x),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("warm", [True, False])
def test_transforms_over(name: str, warm: bool) -> None:
    compiled = strict(_inner)
    x = leaf(2, 3, grad=False)
    if warm:
        compiled(x)
        compiled(x[0])
    for _ in range(2):
        assert_equal(TRANSFORMS[name](_inner)(x), TRANSFORMS[name](compiled)(x))


def test_forward_mode_duals_over() -> None:
    import torch.autograd.forward_ad as fwAD

    compiled = strict(_inner)
    x = leaf(2, 3, grad=False)
    compiled(x)
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, torch.ones(2, 3))
        expected, found = fwAD.unpack_dual(_inner(dual)), fwAD.unpack_dual(compiled(dual))
        assert_equal((expected.primal, expected.tangent), (found.primal, found.tangent))


def test_vmap_over_a_compiled_module() -> None:
    model = torch.nn.Linear(3, 2)
    compiled = strict(model)
    x = leaf(4, 3)
    compiled(x)
    torch.testing.assert_close(torch.func.vmap(compiled)(x), model(x))


def test_make_fx_over() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    compiled = strict(_inner)
    x = leaf(2, 3, grad=False)
    compiled(x)
    traced = make_fx(compiled)(x)
    y = leaf(2, 3, seed=5, grad=False)
    assert torch.equal(traced(y), _inner(y))

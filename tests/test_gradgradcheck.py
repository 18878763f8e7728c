"""First, second and third derivatives of compiled functions against numerical ones, in float64.

Every case of `tests/derivatives` holds in eager, too: `check` says if one does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from derivatives import CASES, Case
from derivatives.cases import real
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.function import once_differentiable

import aheadgrad
from aheadgrad.backends.eager import compile_eager
from aheadgrad.errors import DataDependentError

# With so few numbers in, every entry of the Jacobians is looked at; with more, random projections of them.
SMALL = 24
# With so few tensors in, each tangent is also left out in turn.
FEW = 6

# eager's own: forward mode scripts a few functions when it is first used
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def strict(fn: Any, **options: Any) -> Any:
    return aheadgrad.compile(fn, fallback="error", **options, frontend="trace")


def check(check_order: Callable[..., bool], case: Case, run: Callable[..., Any], **options: Any) -> bool:
    torch.manual_seed(0)
    inputs = case.inputs
    options["fast_mode"] = sum(t.numel() for t in inputs) > SMALL
    options["check_undefined_grad"] = len(inputs) <= FEW
    try:
        return check_order(case.over(run), inputs, atol=1e-4, **options)
    except Exception:
        check_order(
            case.over(case.target), inputs, atol=1e-4, **options
        )  # is it the case, or are we at fault?
        raise


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str) -> None:
    case = CASES[name]()
    run = strict(case.target)
    assert check(gradcheck, case, run)
    assert check(gradgradcheck, case, run)


def test_a_second_derivative_that_decides_on_values() -> None:
    """Torch's formula looks for zeros, to refuse them; first derivatives do not."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return x.scatter_reduce(0, torch.tensor([0, 0, 1]), y, "prod")

    inputs = [real(3).abs().add(1).detach().requires_grad_() for _ in range(2)]
    run = strict(product)
    assert gradcheck(run, inputs)
    out = run(*inputs).sum()
    for _ in range(2):
        with pytest.raises(DataDependentError) as error:
            torch.autograd.grad(out, inputs, create_graph=True)
        text = str(error.value)
        assert "needs the value of a tensor to decide what to do" in text
        assert "in product" in text
        assert text.count("Instead:") == 1
    torch.autograd.grad(out, inputs)


def test_the_list_is_long() -> None:
    assert len(CASES) >= 60


SOME = [
    *("matmul", "linear", "attention written out", "layer norm", "softmax", "conv2d", "writes into views"),
    *("index_put", "several parts", "custom function", "complex product", "where", "cross entropy"),
]
# eager's own third derivative of layer_norm is wrong
THIRD = [name for name in SOME if name != "layer norm"]


@pytest.mark.parametrize("name", SOME)
def test_tangents_with_gaps(name: str) -> None:
    case = CASES[name]()
    run = strict(case.target)
    assert check(gradgradcheck, case, run, gen_non_contig_grad_outputs=True)


@pytest.mark.parametrize("name", SOME)
def test_batched_tangents(name: str) -> None:
    case = CASES[name]()
    run = strict(case.target)
    assert check(gradcheck, case, run, check_batched_grad=True)
    assert check(gradgradcheck, case, run, check_batched_grad=True)


def gradient_of(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The gradients of a function as a function of `count` inputs and the tangents behind them."""

    def gradient(*args: Tensor) -> Any:
        outs = run(*args[:count])
        outs = [t for t in (outs if isinstance(outs, tuple) else (outs,)) if t.requires_grad]
        grads = torch.autograd.grad(
            outs, args[:count], args[count:], create_graph=True, materialize_grads=True
        )
        return tuple(g for g in grads if g.requires_grad)

    return gradient


@pytest.mark.parametrize("name", THIRD)
def test_third_derivatives(name: str) -> None:
    case = CASES[name]()
    outs = case.target(*case.args)
    outs = [t for t in (outs if isinstance(outs, tuple) else (outs,)) if t.requires_grad]
    tangents = [real(*t.shape, seed=9).detach().to(t.dtype).requires_grad_() for t in outs]
    run = strict(case.target)
    gradient = gradient_of(case.over(run), len(case.inputs))
    torch.manual_seed(0)
    assert gradgradcheck(gradient, (*case.inputs, *tangents), fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("p", [0.3, 0.5])
def test_dropout(p: float) -> None:
    """The same numbers at each call, so that there is something to differentiate."""
    x = real(6)

    def seeded(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(t: Tensor) -> Tensor:
            torch.manual_seed(3)
            return run(t)

        return call

    def fn(t: Tensor) -> Tensor:
        return torch.dropout(t.exp(), p, True) * torch.rand(6, dtype=t.dtype) * t

    for run in (fn, strict(fn)):
        assert gradcheck(seeded(run), (x,))
        assert gradgradcheck(seeded(run), (x,))


# what eager refuses


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def flash(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "once_differentiable": (lambda x: Once.apply(x * 2), (3,)),
    "once_differentiable, then more": (lambda x: Once.apply(x).exp(), (3,)),
    "the fused attention kernel": (flash, (1, 2, 3, 2)),
    "hardsigmoid": (torch.nn.functional.hardsigmoid, (3,)),
    "cdist": (lambda x: torch.cdist(x, x.flip(0)), (3, 2)),
}


def second_derivative(run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str) -> None:
    """The second derivative raises what eager raises; the first can be had, with a graph or without."""
    fn, shape = REFUSED[name]
    compiled = strict(fn)
    x = real(*shape)
    with pytest.raises(RuntimeError) as expected:
        second_derivative(fn, x)
    for _ in range(2):
        for create_graph in (True, False):
            (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=create_graph)
            (eager,) = torch.autograd.grad(fn(x).sum(), x, create_graph=create_graph)
            torch.testing.assert_close(first, eager)
            assert first.requires_grad == eager.requires_grad
        with pytest.raises(RuntimeError) as found:
            second_derivative(compiled, x)
        assert str(expected.value).splitlines()[0] in str(found.value)


def test_once_differentiable_beside_others() -> None:
    """Eager leaves its part out of the second derivative without a word."""

    def fn(x: Tensor) -> Tensor:
        return Once.apply(x) + x**3

    compiled = strict(fn)
    x = real(3)
    for _ in range(2):
        torch.testing.assert_close(second_derivative(compiled, x), second_derivative(fn, x))


# every order runs compiled graphs


class CountingBackend:
    """The eager backend; counts how many programs were compiled and run, by role."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()

    def __call__(self, program: Any) -> Callable[[list[Any]], list[Any]]:
        run = compile_eager(program)
        self.compiled[program.role] += 1

        def counted(args: list[Any]) -> list[Any]:
            self.runs[program.role] += 1
            return run(args)

        return counted

    @property
    def total(self) -> int:
        return sum(self.runs.values())


def nodes_behind(t: Tensor) -> Iterator[Any]:
    """The autograd nodes that a tensor's history is made of."""
    seen: set[Any] = set()
    todo = [t.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [next_node for next_node, _ in node.next_functions]


def eager_nodes_behind(t: Tensor) -> set[str]:
    """Names of nodes that eager's own operations left in a history; compiled ones are Python nodes."""
    python_node = torch.autograd.function.BackwardCFunction
    return {
        n.name()
        for n in nodes_behind(t)
        if not isinstance(n, python_node) and not n.name().endswith("AccumulateGrad")
    }


def body(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).softmax(-1).sum()


def test_every_order_runs_compiled_graphs() -> None:
    backend = CountingBackend()
    compiled = strict(body, backend=backend)
    x, w = real(3, 3, seed=1), real(3, 3, seed=2)
    expected, found = body(x, w), compiled(x, w)
    runs = [backend.total]
    assert eager_nodes_behind(found) == set()
    for order in (1, 2, 3):
        (expected,) = torch.autograd.grad(expected, x, torch.ones_like(expected), create_graph=True)
        (found,) = torch.autograd.grad(found, x, torch.ones_like(found), create_graph=True)
        torch.testing.assert_close(found, expected)
        runs.append(backend.total)
        assert runs[-1] > runs[-2], f"nothing compiled ran for order {order}"
        assert eager_nodes_behind(found) == set(), f"eager operations in the history of order {order}"


def test_every_order_is_compiled_once() -> None:
    backend = CountingBackend()
    compiled = strict(body, backend=backend)

    def third() -> Tensor:
        x, w = real(3, 3, seed=1), real(3, 3, seed=2)
        (g,) = torch.autograd.grad(compiled(x, w), x, create_graph=True)
        (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), w)[0]

    first = third()
    programs = sum(backend.compiled.values())
    for _ in range(3):
        assert torch.equal(third(), first)
    assert sum(backend.compiled.values()) == programs


def test_higher_orders_of_a_module_run_compiled_graphs() -> None:
    backend = CountingBackend()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    compiled = strict(model, backend=backend)
    x = real(5, 3)
    (g,) = torch.autograd.grad(compiled(x), x, torch.ones(5, 1, dtype=x.dtype), create_graph=True)
    assert eager_nodes_behind(g) == set()
    before = backend.total
    g.pow(2).sum().backward()
    assert backend.total > before
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    (g,) = torch.autograd.grad(model(x), x, torch.ones(5, 1, dtype=x.dtype), create_graph=True)
    g.pow(2).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])

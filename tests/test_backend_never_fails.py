"""`torch.compile(fn, backend="aheadgrad")` works wherever torch's own `aot_eager` backend does, as in eager.

Most programs are compiled; a few run as the graph that Dynamo gave, or are recorded again when their backward
runs, with one warning that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import aheadgrad
from aheadgrad import compat
from aheadgrad.errors import DataDependentError, FallbackWarning

close = torch.testing.assert_close
Case = tuple[str, Callable[..., Any], Callable[[], list[Tensor]]]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def observe(fn: Callable[..., Any], make: Callable[[], list[Tensor]], seed: int) -> list[Any]:
    torch.manual_seed(seed)
    args = make()
    torch.manual_seed(100)
    out = [t for t in pytree.tree_leaves(fn(*args)) if isinstance(t, Tensor)]
    heads = [t for t in out if t.requires_grad]
    if heads:
        parts: list[Any] = [t.abs().double().sum() if t.is_complex() else t.double().sum() for t in heads]
        sum(parts).backward()
    return [[t.detach() for t in out], [a.grad for a in args], torch.get_rng_state()]


def same(fn: Callable[..., Any], make: Callable[[], list[Tensor]], backend: Any) -> None:
    compiled = torch.compile(fn, backend=backend)
    for seed in range(2):
        close(observe(compiled, make, seed), observe(fn, make, seed))


# -- programs that are compiled ------------------------------------------------------------------------

GRU = nn.GRU(3, 4).requires_grad_(False)
LSTM = nn.LSTM(3, 4, bidirectional=True).requires_grad_(False)
ATTENTION = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).requires_grad_(False)
NORM = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.AvgPool2d(2))
NORM.requires_grad_(False)


@torch.library.custom_op("never_fails::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


@sine.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


sine.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0].cos(), setup_context=_keep)


@torch.library.custom_op("never_fails::doubles", mutates_args={"x"})
def doubles(x: Tensor) -> None:
    x.mul_(2)


def changes_by_custom_op(x: Tensor) -> Tensor:
    y = x.clone()
    doubles(y)
    return y + 1


def numpy_numbers(x: Tensor) -> Tensor:
    return x * torch.tensor(np.sqrt(np.pi * 2)) + float(np.sqrt(2 / np.pi)) + np.float64(2.5)


def sizes_as_tensors(x: Tensor) -> Tensor:
    return x.reshape(int(np.prod(x.shape))) * torch.tensor(x.shape).prod()


def known_constants(x: Tensor) -> Tensor:
    if torch.tensor(3.0) > 2:
        x = x * torch.tensor(4).item()
    return x + torch.arange(3).sum()


def distributions(x: Tensor) -> Any:
    normal = torch.distributions.Normal(x, x.exp() + 0.1)
    other = torch.distributions.Categorical(logits=x)
    return normal.log_prob(torch.zeros(4)), normal.rsample(), other.entropy(), other.log_prob(other.sample())


def linear_algebra(x: Tensor) -> Any:
    a = x @ x.t() + 3 * torch.eye(3)
    return torch.linalg.cholesky(a), torch.linalg.solve(a, x), torch.linalg.eigh(a)[0], torch.logdet(a)


def trains_inside(x: Tensor) -> Tensor:
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1)
    (w * x.detach()).sum().backward()
    optimizer.step()
    return w.detach() * x


def indexing(x: Tensor) -> Any:
    rows = torch.zeros(1, 4, dtype=torch.long)
    return (
        x.gather(0, rows),
        x.scatter(0, rows, x[:1]),
        x.take(torch.tensor([0, 5])),
        torch.where(x > 0, x, -x),
    )


def transforms(x: Tensor) -> Any:
    return torch.vmap(lambda t: t * t.sum())(x), torch.func.grad(lambda t: t.sin().sum())(x)


def ctc(x: Tensor) -> Tensor:
    lengths = torch.tensor([6, 6]), torch.tensor([3, 2])
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2, 3], [2, 1, 1]]), *lengths)


COMPILED: list[Case] = [
    ("one_hot", lambda x: F.one_hot(x.detach().argmax(1), 4) * x, lambda: [leaf(3, 4)]),
    ("numpy numbers", numpy_numbers, lambda: [leaf(3)]),
    ("sizes as tensors", sizes_as_tensors, lambda: [leaf(3, 2)]),
    ("constants that are read", known_constants, lambda: [leaf(3)]),
    ("gru", GRU, lambda: [leaf(5, 2, 3)]),
    ("lstm", LSTM, lambda: [leaf(5, 2, 3)]),
    ("transformer layer", ATTENTION, lambda: [leaf(2, 5, 8)]),
    ("convolution", NORM, lambda: [leaf(2, 3, 8, 8)]),
    ("custom op", lambda x: sine(x * 2) * 2, lambda: [leaf(3)]),
    ("custom op that changes its argument", changes_by_custom_op, lambda: [torch.randn(3)]),
    ("distributions", distributions, lambda: [leaf(4)]),
    ("linear algebra", linear_algebra, lambda: [leaf(3, 3)]),
    ("an optimizer inside", trains_inside, lambda: [leaf(3)]),
    ("indexing", indexing, lambda: [leaf(4, 4)]),
    ("transforms", transforms, lambda: [leaf(3, 4)]),
    (
        "fft",
        lambda x: (torch.fft.irfft(torch.fft.rfft(x) * 2), torch.fft.fft2(x).abs()),
        lambda: [leaf(4, 8)],
    ),
    ("sparse", lambda x: torch.eye(3).to_sparse() @ x, lambda: [leaf(3, 2)]),
    ("quantized", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7), lambda: [leaf(3)]),
    ("complex", lambda x: torch.view_as_complex(x).abs(), lambda: [leaf(3, 2)]),
    ("checkpoint", lambda x: checkpoint(torch.sin, x, use_reentrant=False), lambda: [leaf(3)]),
    ("cond", lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), lambda: [leaf(3)]),
    ("random", lambda x: x + torch.rand(3) + torch.randperm(3) + torch.normal(x, 1.0), lambda: [leaf(3)]),
    ("reductions", lambda x: (x.prod(0), x.median(0)[0], x.topk(2)[0], x.logsumexp(0)), lambda: [leaf(4, 4)]),
    ("ctc loss", ctc, lambda: [leaf(6, 2, 5)]),
]


@pytest.mark.parametrize("case", COMPILED, ids=lambda c: c[0])
@pytest.mark.filterwarnings("ignore:To copy construct|.*Dynamo does not know|.*does not have a deterministic")
def test_compiled(case: Case) -> None:
    _, fn, make = case
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=FallbackWarning)
        same(fn, make, "aheadgrad")


def test_one_hot_checks_its_classes() -> None:
    def fn(i: Tensor) -> Tensor:
        return F.one_hot(i, 3)

    compiled = torch.compile(fn, backend="aheadgrad")
    compiled(torch.tensor([0, 2]))
    for wrong in ([0, 3], [-1, 0]):
        with pytest.raises(RuntimeError) as expected:
            fn(torch.tensor(wrong))
        with pytest.raises(RuntimeError, match=str(expected.value)):
            compiled(torch.tensor(wrong))


# -- programs that run as the graph that was given -----------------------------------------------------


class ReadsInBackward(torch.autograd.Function):
    """Called by a custom op, where Dynamo does not look."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2 * ctx.saved_tensors[0].sign().numpy().sum().item()


@torch.library.custom_op("never_fails::pieces", mutates_args=())
def pieces(x: Tensor, ends: Tensor) -> Tensor:
    out, start = torch.empty_like(x), 0
    for k, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] * (k + 1)
        start = end
    return out


@pieces.register_fake
def _(x: Tensor, ends: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_ends(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.ends = inputs[1]


def _pieces_backward(ctx: Any, grad: Tensor) -> Any:
    out, start = torch.zeros_like(grad), 0
    for k, end in enumerate(ctx.ends.tolist()):
        out[start:end] = grad[start:end] * (k + 1)
        start = end
    return out, None


pieces.register_autograd(_pieces_backward, setup_context=_keep_ends)


def test_a_backward_that_reads_values() -> None:
    def make() -> list[Tensor]:
        return [leaf(5), torch.tensor([2, 5])]

    def fn(x: Tensor, ends: Tensor) -> Tensor:
        return pieces(x.sin(), ends) ** 2

    with pytest.warns(FallbackWarning, match="tolist"):
        same(fn, make, "aheadgrad")
    torch._dynamo.reset()
    strict = torch.compile(fn, backend="aheadgrad", options={"fallback": "error"})
    with pytest.raises(Exception, match="needs the value of a tensor"):
        strict(*make())


def test_numpy_in_a_backward_is_not_garbage() -> None:
    traced = aheadgrad.compile(lambda x: ReadsInBackward.apply(x).sum(), frontend="trace", fallback="error")
    with pytest.raises(DataDependentError, match="numpy"):
        traced(leaf(3))


@pytest.mark.parametrize("where", ["module", "branch"])
def test_hooks_that_read_values(where: str) -> None:
    def run(wrap: Callable[[nn.Module], Any]) -> Any:
        torch.manual_seed(0)
        log: list[float] = []
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def look(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            if where == "module":
                log.append(round(grad_output[0].norm().item(), 4))
                return None
            return (grad_input[0] * 2,) if grad_output[0].abs().max() > 0.1 else None

        net[2].register_full_backward_hook(look)
        call, x = wrap(net), torch.randn(5, 3)
        for _ in range(2):
            call(x).sum().backward()
        return log, [p.grad for p in net.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        close(run(lambda net: torch.compile(net, backend="aheadgrad")), run(lambda net: net))


def test_any_exception_of_ours_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from aheadgrad.frontends import dynamo

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something is wrong with us")

    monkeypatch.setattr(dynamo, "compile_flat", broken)
    with pytest.warns(FallbackWarning, match="something is wrong with us"):
        same(torch.sin, lambda: [leaf(3)], "aheadgrad")
    torch._dynamo.reset()
    strict = torch.compile(torch.cos, backend="aheadgrad", options={"fallback": "error"})
    with pytest.raises(Exception, match="something is wrong with us"):
        strict(leaf(3))


# -- backwards that look at values when they run -------------------------------------------------------


def scattered(x: Tensor) -> Tensor:
    return torch.zeros(3).scatter_reduce(0, torch.tensor([0, 0, 1, 2]), x, "prod", include_self=False).sum()


class LooksWhenDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        factor = 6 if torch.is_grad_enabled() and x.sum().item() > 1 else 3
        return factor * x**2 * grads[0]


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(x, g)
        return 3 * x**2 * g

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, g = ctx.saved_tensors
        factor = 2 if grads[0].tolist()[1] > 0 else 1
        return 6 * x * g * grads[0] * factor, 3 * x**2 * grads[0]


class LooksAtTangents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Inner.apply(ctx.saved_tensors[0], grads[0])


def second_order(fn: Callable[[Tensor], Tensor], values: list[float], sign: int) -> Any:
    x = torch.tensor(values, requires_grad=True)
    y = fn(x)
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.arange(4.0) * sign).sum(), x)
    return y.detach(), first.detach(), second


@pytest.mark.parametrize(
    ("fn", "frontend"),
    [
        (scattered, "trace"),
        (scattered, "dynamo"),
        (lambda x: LooksWhenDifferentiable.apply(x * 2).sum(), "trace"),
        (lambda x: LooksAtTangents.apply(x * 2).sum(), "trace"),
    ],
    ids=["scatter_reduce", "scatter_reduce, dynamo", "saved tensors", "tangents"],
)
def test_higher_orders_that_look_at_values(fn: Any, frontend: str) -> None:
    compiled = aheadgrad.compile(fn, frontend=frontend)
    with pytest.warns(FallbackWarning, match="each time it runs") as told:
        for sign in (1, -1):
            for values in ([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 0.0, 4.0], [0.1, 0.2, 0.3, -4.0]):
                close(second_order(compiled, values, sign), second_order(fn, values, sign))
    assert sum(issubclass(w.category, FallbackWarning) for w in told) == 1


def test_higher_orders_that_look_at_values_are_refused_if_asked() -> None:
    compiled = aheadgrad.compile(scattered, frontend="trace", fallback="error")
    with pytest.raises(DataDependentError, match="needs the value of a tensor"):
        second_order(compiled, [1.0, 2.0, 3.0, 4.0], 1)


def test_the_drop_in_checks_what_nobody_guards() -> None:
    def minus(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (x - y,)

    graph, x, y = torch.fx.symbolic_trace(minus), leaf(2), leaf(2)
    close(compat.aot_module_simplified(graph, (x, x), compat.nop)(x, y)[0], x - y)
    compat.aot_module_simplified(graph, (x, y.detach()), compat.nop)(x, y)[0].sum().backward()
    close(y.grad, -torch.ones(2))


def test_a_view_that_changed_its_shape_in_a_list_of_the_graph() -> None:
    """Graphs hold lists of a kind of their own; what stands for the view has to be found in those, too."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        part = x.clone()[-1]
        part.as_strided_((2,), (2,))
        return torch.cat([part, y])

    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="aheadgrad", options={"fallback": "error"})
    assert torch.equal(compiled(x, y), fn(x, y))
    assert torch.equal(
        torch.autograd.grad(compiled(x, y).square().sum(), x)[0],
        torch.autograd.grad(fn(x, y).square().sum(), x)[0],
    )

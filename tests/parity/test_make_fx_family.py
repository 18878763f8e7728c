"""Counterparts of torch's tests of `make_fx` and `nnc_jit`: capture once, run with other values.

A function transform can be inside (`compile(grad(f))`) or outside (`grad(compile(f))`); both are as in eager.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.func import functionalize, grad, jacrev, vjp, vmap

from .common import Cell, compile_and_keep, verify
from .peer import OURS, PEER

Entry = Callable[..., Any]
close = torch.testing.assert_close


def sine_sum(x: Tensor) -> Tensor:
    return torch.sin(x).sum()


def nested_jacobian(x: Tensor) -> Any:
    return jacrev(jacrev(sine_sum))(x)


INSIDE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "plain": (torch.sin, (3,)),
    "scalar": (torch.sin, ()),
    "grad": (grad(sine_sum), (3,)),
    "vmap": (vmap(torch.sin), (5, 3)),
    "jacrev of jacrev": (nested_jacobian, (3,)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_captured_once_and_run_with_other_values(entry: Entry, name: str) -> None:
    fn, shape = INSIDE[name]
    compiled = entry(fn)
    for _ in range(2):
        x = torch.randn(shape)
        close(compiled(x), fn(x))


@pytest.mark.skipif(PEER == "eager", reason="eager has no graph")
@pytest.mark.parametrize("name", INSIDE)
def test_captured_graph_alone_run_with_other_values(name: str) -> None:
    fn, shape = INSIDE[name]
    cell = Cell()
    compile_and_keep(fn, cell)(torch.randn(shape))
    x = torch.randn(shape)
    close(cell.last(x)[0], fn(x))


@pytest.mark.skipif(not OURS, reason="our own entry point")
def test_capture_alone_prints_what_it_caught() -> None:
    captured = importlib.import_module("aheadgrad").capture(sine_sum, torch.randn(3, requires_grad=True))
    assert "aten.sin.default" in str(captured)
    assert "aten.cos.default" in str(captured)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_vector_jacobian_product_inside(entry: Entry, requires_grad: bool) -> None:
    x = torch.randn(3)

    def pulled_back(cotangent: Tensor, x: Tensor) -> Any:
        _, pull_back = vjp(sine_sum, x)
        return pull_back(cotangent)

    compiled = entry(pulled_back)
    for _ in range(2):
        cotangent = torch.randn((), requires_grad=requires_grad)
        found, expected = compiled(cotangent, x), pulled_back(cotangent, x)
        close(tuple(found), tuple(expected))
        assert found[0].requires_grad == expected[0].requires_grad


@pytest.mark.differs_from_peer("tensors closed over are refused")
def test_vector_jacobian_product_with_its_point_closed_over() -> None:
    """The document captures the pull-back itself, a closure over the point and what its forward kept."""
    _, pull_back = vjp(sine_sum, torch.randn(3))
    verify(pull_back, lambda: [torch.randn(())], keep=(True,))


OUTSIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]] = {
    "grad": (grad, sine_sum, (3,)),
    "grad of grad": (lambda f: vmap(grad(grad(f))), torch.sin, (3,)),
    "vmap": (vmap, torch.sin, (5, 3)),
    "jacrev": (jacrev, torch.sin, (3,)),
    "jacrev of jacrev": (lambda f: jacrev(jacrev(f)), sine_sum, (3,)),
    "vmap of grad": (lambda f: vmap(grad(f)), sine_sum, (5, 3)),
    "vjp": (lambda f: lambda x: vjp(f, x)[1](torch.ones(3)), torch.sin, (3,)),
}


@pytest.mark.differs_from_peer("no function transform over a compiled function")
@pytest.mark.parametrize("name", OUTSIDE)
def test_transform_outside(entry: Entry, name: str) -> None:
    transform, fn, shape = OUTSIDE[name]
    compiled = transform(entry(fn))
    for _ in range(2):
        x = torch.randn(shape)
        close(compiled(x), transform(fn)(x))


def test_scalar_beside_a_vector(entry: Entry) -> None:
    args = torch.randn(3), torch.tensor(5)
    close(entry(torch.add)(*args), torch.add(*args))


def double_and_clip(x: Tensor) -> Tensor:
    x = x * 2
    x.relu_()
    return x


def test_in_place_op_becomes_functional() -> None:
    traced = torch.fx.symbolic_trace(double_and_clip)
    assert any(node.target == "relu_" for node in traced.graph.nodes)
    for fn in (double_and_clip, traced, functionalize(traced)):
        cell = Cell()
        x = torch.randn(3)
        close(compile_and_keep(fn, cell)(x), double_and_clip(x))
        targets = [str(node.target) for node in cell.last.graph.nodes]
        assert "aten.relu.default" in targets
        assert "aten.relu_.default" not in targets


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_backward_op_is_kept_unless_a_decomposition_is_given(decomposed: bool, inside: bool) -> None:
    forward, backward = Cell(), Cell()
    table = decomposition_table if decomposed else None

    def tanh_sum(x: Tensor) -> Tensor:
        return torch.tanh(x).sum()

    fn = grad(tanh_sum) if inside else tanh_sum
    compiled = compile_and_keep(fn, forward, backward=backward, decompositions=table)
    x = torch.randn(5, requires_grad=not inside)
    expected = 1 - x.detach().tanh() ** 2
    if inside:
        close(compiled(x), expected)
    else:
        compiled(x).backward()
        close(x.grad, expected)
    graph = (forward if inside else backward).last
    ops = {node.target for node in graph.graph.nodes}
    assert (torch.ops.aten.tanh_backward.default in ops) == (not decomposed)


def test_list_in_list_out(entry: Entry) -> None:
    def first_sine(xs: list[Tensor]) -> list[Tensor]:
        return [torch.sin(xs[0])]

    xs = [torch.randn(3)]
    close(entry(first_sine)(xs), first_sine(xs))


def test_matrix_times_vector(entry: Entry) -> None:
    args = torch.randn(3, 3), torch.randn(3)
    close(entry(torch.mv)(*args), torch.mv(*args))


def test_input_passed_through(entry: Entry) -> None:
    def sum_and_second(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, y

    x, y = torch.randn(3), torch.randn(3)
    found = entry(sum_and_second)(x, y)
    close(tuple(found), sum_and_second(x, y))
    assert found[1] is y


def double_a(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["a"] = tensors["a"] * 2
    return tensors


@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")  # a dictionary given is written to
def test_dictionary_returned(entry: Entry) -> None:
    a, b = torch.randn(3), torch.randn(3)
    found = entry(double_a)({"a": a, "b": b})
    assert list(found) == ["a", "b"]
    close(found, {"a": a * 2, "b": b})


# -- a convolution net -----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return y.relu_()


def residual_net() -> nn.Module:
    stem = [
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return nn.Sequential(*stem, Block(8), Block(8), *head)


def test_residual_net_as_a_module() -> None:
    verify(residual_net(), lambda: [torch.randn(2, 3, 16, 16, requires_grad=True)], keep=(False,))


@pytest.mark.parametrize(
    "closed_over",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.differs_from_peer("buffers closed over and written are refused")
        ),
    ],
)
def test_residual_net_with_its_backward_inside(entry: Entry, closed_over: bool) -> None:
    net = residual_net().double()
    eager = copy.deepcopy(net)
    weights = {name: w.detach().requires_grad_() for name, w in net.named_parameters()}
    buffers = {} if closed_over else dict(net.named_buffers())

    def gradients(weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        out = torch.func.functional_call(net, {**weights, **buffers}, (x,)).sum()
        return list(torch.autograd.grad(out, list(weights.values())))

    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    eager(x).sum().backward()
    found = entry(gradients)(weights, buffers, x)
    close(list(found), [w.grad for w in eager.parameters()])
    close(dict(net.named_buffers()), dict(eager.named_buffers()))

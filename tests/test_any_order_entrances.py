"""Higher derivatives through every way in: symbolic sizes, the drop-in API, Dynamo, backends, models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad import compat
from aheadgrad.backends.eager import compile_eager

close = torch.testing.assert_close


def double(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def orders(run: Callable[..., Any], inputs: list[Tensor], parameters: tuple[Tensor, ...] = ()) -> list[Any]:
    """Values, first, second and third derivatives of a loss."""
    torch.manual_seed(0)
    outs = run(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    loss = sum(o.pow(2).sum() for o in outs)
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty = sum(g.pow(2).sum() for g in first)
    wanted = [*inputs, *parameters]
    second = torch.autograd.grad(penalty, wanted, create_graph=True, allow_unused=True)
    rest = sum(g.sin().sum() for g in second if g is not None)
    third = torch.autograd.grad(rest, wanted, allow_unused=True)
    return [*outs, *first, *second, *third]


def agree(eager: list[Any], found: list[Any]) -> None:
    for e, f in zip(eager, found, strict=True):
        assert (e is None) == (f is None)
        if e is not None:
            close(f, e, rtol=1e-9, atol=1e-10)


def layer(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = (x @ w).tanh()
    return h.view(-1)[: x.shape[0]] * x.sum(1), h.softmax(0), h.t() * 2


SIZES = (2, 4, 5, 2, 7)


def test_symbolic_sizes() -> None:
    compiled = aheadgrad.compile(layer, dynamic=True, fallback="error", frontend="trace")
    for n in SIZES:
        inputs = [double(n, 3), double(3, 3, seed=1)]
        agree(orders(layer, inputs), orders(compiled, inputs))
    assert len(compiled.entries) == 1


def test_sizes_that_change() -> None:
    compiled = aheadgrad.compile(layer, fallback="error", frontend="trace")
    for n in SIZES:
        inputs = [double(n, 3), double(3, 3, seed=1)]
        agree(orders(layer, inputs), orders(compiled, inputs))


@pytest.mark.parametrize("boxed", [False, True])
def test_aot_function(boxed: bool) -> None:
    """Compilers in torch's sense see graphs of every order, each of them valid by itself."""
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: list[Any]) -> Any:
        graph.graph.lint()
        names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
        assert len(names) == len(set(names)) == len(inputs)
        graphs.append(graph)
        return compat.make_boxed_func(graph.forward) if boxed else graph

    compiled = compat.aot_function(layer, fw_compiler=compiler, bw_compiler=compiler)
    inputs = [double(4, 3), double(3, 3, seed=1)]
    for _ in range(2):
        agree(orders(layer, inputs), orders(compiled, inputs))
    assert len(graphs) >= 4, "a forward and a backward for each order"


def test_aot_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    compiled = compat.aot_module(model, fw_compiler=lambda g, _: g, bw_compiler=lambda g, _: g)
    inputs, parameters = [double(5, 3)], tuple(model.parameters())
    agree(orders(model, inputs, parameters), orders(compiled, inputs, parameters))


def test_a_backend_of_ones_own() -> None:
    roles: list[str] = []

    def backend(program: Any) -> Any:
        roles.append(program.role)
        program.module.graph.lint()
        run = compile_eager(program)
        return lambda args: run(args)

    compiled = aheadgrad.compile(layer, backend=backend, fallback="error", frontend="trace")
    inputs = [double(4, 3), double(3, 3, seed=1)]
    for _ in range(2):
        agree(orders(layer, inputs), orders(compiled, inputs))
    count = len(roles)
    agree(orders(layer, inputs), orders(compiled, inputs))
    assert len(roles) == count, "compiled again"


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamo(dynamic: bool) -> None:
    compiled = torch.compile(layer, backend="aheadgrad", dynamic=dynamic)
    for n in (4, 5):
        inputs = [double(n, 3), double(3, 3, seed=1)]
        agree(orders(layer, inputs), orders(compiled, inputs))


class Residual(nn.Module):
    """Convolutions, batch norm that keeps statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.head, self.dropout = nn.Linear(3, 2), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm1(self.first(x)))
        h = F.silu(self.norm2(self.second(h)) + h)
        out: Tensor = self.head(self.dropout(F.adaptive_avg_pool2d(h, 1).flatten(1)))
        return out


def test_a_convolutional_model() -> None:
    torch.manual_seed(0)
    eager = Residual().double()
    other = copy.deepcopy(eager)
    compiled = aheadgrad.compile(other, fallback="error", frontend="trace")
    for _ in range(2):
        inputs = [double(2, 2, 4, 4)]
        expected = orders(eager, inputs, tuple(eager.parameters()))
        agree(expected, orders(compiled, inputs, tuple(other.parameters())))
    agree(list(eager.buffers()), list(other.buffers()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, shift: Tensor, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + shift
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(mask, float("-inf"))
        out: Tensor = F.linear(x + self.out(scores.softmax(-1) @ v), self.embed.weight)
        return out


def test_a_transformer_with_tied_weights() -> None:
    """Gradients of a shift of the embeddings, then of the parameters: virtual adversarial training."""
    torch.manual_seed(0)
    eager = Block().double()
    other = copy.deepcopy(eager)
    compiled = aheadgrad.compile(other, fallback="error", frontend="trace")
    tokens = torch.tensor([[0, 3, 6, 3]])
    shift = [double(1, 4, 4)]
    for _ in range(2):
        expected = orders(lambda s: eager(s, tokens), shift, tuple(eager.parameters()))
        agree(expected, orders(lambda s: compiled(s, tokens), shift, tuple(other.parameters())))

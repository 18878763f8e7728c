"""Symbolic sizes: one entry for many sizes, forward and backward, as in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import aheadgrad
from aheadgrad import compat

close = torch.testing.assert_close
Make = Callable[[int], list[Any]]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def transpose_in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    x.t_()
    return x + 1, y.view(-1)


def views_of_one(x: Tensor) -> tuple[Tensor, ...]:
    x.mul_(2)
    y = x * 3
    return y.view(-1), y.t(), y[1:]


PROGRAMS: dict[str, tuple[Callable[..., Any], Make]] = {
    "matmul": (lambda x, w: (x @ w).relu(), lambda n: [leaf(n, 4), leaf(4, 5)]),
    "sizes returned": (lambda x: (x.t() * 2, x.shape[0], x.numel()), lambda n: [leaf(n, 4)]),
    "input changed": (transpose_in_place, lambda n: [leaf(n, 4) * 1, leaf(n, 7)]),
    "views": (views_of_one, lambda n: [leaf(n, 4) * 1]),
    "view of an input": (lambda x: x[1:, ::2].t(), lambda n: [leaf(n, 4)]),
    "norm": (
        lambda x, w, b: F.layer_norm(x, (4,), w, b).softmax(-1).sum(0),
        lambda n: [leaf(n, 6, 4), leaf(4), leaf(4)],
    ),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda n: [leaf(2, 3, n, 4)],
    ),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1).flatten(1),
        lambda n: [leaf(2, 3, n, n), leaf(4, 3, 3, 3)],
    ),
    "parts": (lambda x: torch.cat([x, x[:, :2]], 1).split(4, 1), lambda n: [leaf(n, 6)]),
    "expand": (lambda x: x.unsqueeze(1).expand(-1, 3, -1) * x.shape[0], lambda n: [leaf(n, 4)]),
    "other order in memory": (
        lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0) * 2,
        lambda n: [leaf(n, 4, n + 1)],
    ),
    "mean": (lambda x: x[::2].sum() / x.shape[0] + x.numel(), lambda n: [leaf(n, 4)]),
    "reshape": (
        lambda x: (x.sum(0).expand(x.shape[0], 3) * x).reshape(x.shape[0] * 3),
        lambda n: [leaf(n, 3)],
    ),
    "no grad": (lambda x: x.sin().reshape(-1), lambda n: [torch.randn(n, 3)]),
}
COMPILERS: dict[str, Callable[..., Any]] = {
    "compile": lambda fn: aheadgrad.compile(fn, dynamic=True, fallback="error"),
    "drop-in": lambda fn: compat.aot_function(fn, compat.nop, dynamic=True),
    "drop-in, updates inside": lambda fn: compat.aot_function(
        fn, compat.nop, dynamic=True, keep_inference_input_mutations=True
    ),
}


def observe(fn: Callable[..., Any], make: Make, n: int) -> Iterator[tuple[str, Any]]:
    """What the caller sees; gradients of each output alone, for tangents of two layouts."""
    torch.manual_seed(n)
    args = make(n)
    roots = [t.grad_fn.next_functions[0][0].variable if t.grad_fn else t for t in args]
    roots = [t for t in roots if t.requires_grad]
    outs = pytree.tree_leaves(fn(*args))
    yield "outputs", outs
    yield "strides", [t.stride() for t in outs if isinstance(t, Tensor)]
    yield "inputs", [(t.detach().clone(), t.stride()) for t in args]
    for out in outs:
        if isinstance(out, Tensor) and out.requires_grad:
            weights = torch.linspace(1, 2, out.numel()).reshape(out.shape)
            for tangent in (weights, torch.ones(()).expand_as(out)):
                found = torch.autograd.grad(out, roots, tangent, retain_graph=True, allow_unused=True)
                yield "gradients", [g is None for g in found]
                yield "gradients", [g for g in found if g is not None]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_entry_for_many_sizes(name: str, compiler: str) -> None:
    fn, make = PROGRAMS[name]
    compiled = COMPILERS[compiler](fn)
    for n in (9, 8, 11, 9):
        for (step, found), (_, expected) in zip(
            observe(compiled, make, n), observe(fn, make, n), strict=True
        ):
            close(found, expected, msg=lambda text: f"{step}, size {n}: {text}")
    assert len(compiled.entries) == 1


def test_sizes_zero_and_one_and_equal_sizes_have_entries_of_their_own() -> None:
    compiled = aheadgrad.compile(lambda x, y: x.sum(0) + y.sum(0), dynamic=True, fallback="error")
    for a, b in ((3, 3), (7, 7), (3, 4), (5, 6), (4, 4), (1, 4), (0, 4)):
        x, y = torch.randn(a, 2), torch.randn(b, 2)
        close(compiled(x, y), x.sum(0) + y.sum(0))
    assert len(compiled.entries) == 4


def test_a_decision_on_sizes_makes_another_entry() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 5 else x * 3

    compiled = aheadgrad.compile(fn, dynamic=True, fallback="error")
    for n in (3, 4, 8, 9, 5):
        x = torch.randn(n, 2)
        close(compiled(x), fn(x))
    assert len(compiled.entries) == 2


def test_other_strides_make_another_entry() -> None:
    compiled = aheadgrad.compile(lambda x: x * 2, dynamic=True, fallback="error")
    for x in (torch.randn(3, 4), torch.randn(5, 6), torch.randn(4, 3).t(), torch.randn(6, 5).t()):
        out = compiled(x)
        close(out, x * 2)
        assert out.stride() == (x * 2).stride()
    assert len(compiled.entries) == 2


def test_parameters_have_fixed_sizes() -> None:
    net = torch.nn.Linear(4, 3)
    compiled = aheadgrad.compile(net, dynamic=True, fallback="error")
    for n in (2, 3, 5):
        x = torch.randn(n, 4)
        close(compiled(x), net(x))
    fakes = [e.value for e in compiled.entries[0].entry.captured.session.entrances]
    assert [all(type(n) is int for n in f.shape) for f in fakes] == [True, True, False]


def test_backward_gets_sizes_as_numbers_before_tensors() -> None:
    backward: list[Any] = []

    @compat.make_boxed_compiler
    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        backward.append((graph, inputs))
        return graph

    compiled = compat.aot_function(
        lambda x: x.sum(0).expand(x.shape[0], 3) * x, compat.nop, keep, dynamic=True
    )
    x = torch.randn(4, 3, requires_grad=True)
    compiled(x).sum().backward()
    graph, inputs = backward[0]
    assert next(n.name for n in graph.graph.nodes if n.op == "placeholder") == "sym_size_int"
    assert isinstance(inputs[0], torch.SymInt)
    assert all(isinstance(t, Tensor) for t in inputs[1:])

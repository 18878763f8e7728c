"""The drop-in's graphs beside torch's own, to the letter, forward and backward.

Where an op saves its own result (`relu`, `exp`), torch's graphs hold two detached aliases of it and ours
do not; the programs here keep clear of that, and `test_saved_results_have_no_aliases` shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import functorch.compile as theirs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from aheadgrad import compat


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


Make = Callable[[], list[Any]]


def graphs(api: Any, fn: Any, make: Make, *, keep: bool) -> list[tuple[str, str]]:
    """Role and text of every graph that the compilers get, in the order in which they get them."""
    found: list[tuple[str, str]] = []

    def keeper(role: str) -> Any:
        def note(graph: fx.GraphModule, _inputs: list[Any]) -> fx.GraphModule:
            found.append((role, str(graph.code).strip()))
            return graph

        return api.make_boxed_compiler(note)

    torch.manual_seed(0)
    entry = api.aot_module if isinstance(fn, nn.Module) else api.aot_function
    compiled = entry(
        copy.deepcopy(fn),
        keeper("forward"),
        keeper("backward"),
        inference_compiler=keeper("inference"),
        keep_inference_input_mutations=keep,
    )
    outputs = [t for t in pytree.tree_leaves(compiled(*make())) if isinstance(t, Tensor)]
    heads = [t for t in outputs if t.requires_grad]
    if heads:
        torch.autograd.backward(heads, [torch.ones_like(t) for t in heads])
    return found


def scale_in_place(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    return x * w


def update_and_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    y.add_(x)
    return x.t(), y


def scale_unseen(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        x.mul_(2)
    return x, x * w, x.t()


PROGRAMS: dict[str, tuple[Any, Make]] = {
    "linear": (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), lambda: [torch.randn(5, 4)]),
    "tied": (lambda w, x: F.linear(F.linear(x, w), w), lambda: [leaf(4, 4), torch.randn(2, 4)]),
    "layer norm": (nn.LayerNorm(6), lambda: [leaf(3, 6)]),
    "batch norm": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU()),
        lambda: [torch.randn(2, 3, 6, 6)],
    ),
    "batch norm in eval": (nn.BatchNorm1d(3).eval(), lambda: [torch.randn(4, 3)]),
    "embedding": (nn.Embedding(7, 3), lambda: [torch.tensor([1, 2, 1])]),
    "dropout": (lambda x: F.dropout(x, 0.5), lambda: [leaf(3, 5)]),
    "two outputs": (lambda x, y: (x.sin(), (x * y).sum()), lambda: [leaf(3), leaf(3)]),
    "constants": (lambda a, _n, x: a * x, lambda: [2, None, leaf(3)]),
    "indexing": (lambda x: x[:, 1:].sum(0) + x[torch.tensor([0, 1])].mean(), lambda: [leaf(3, 4)]),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), lambda: [leaf(2, 3, 4), leaf(2, 4, 5)]),
    "pooling": (lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2), lambda: [leaf(1, 2, 4, 4)]),
    "no grad": (lambda x: x.sin().cos(), lambda: [torch.randn(3)]),
    "detach": (lambda x: x * x.detach(), lambda: [leaf(3)]),
    "no_grad inside": (lambda x: x * torch.no_grad()(lambda: x.sin())(), lambda: [leaf(3)]),
    "cat and var": (lambda x, y: torch.cat([x, y]).cumsum(0).var(), lambda: [leaf(3), leaf(2)]),
    "unused input": (lambda x, _y: x * 2, lambda: [leaf(3), leaf(2)]),
    "input returned": (lambda x: (x, x.sin()), lambda: [leaf(3)]),
    "complex": (lambda x: (x * 1j).abs(), lambda: [leaf(3)]),
    "one view": (lambda x: (x * 2).view(-1), lambda: [leaf(2, 3)]),
    "plain input changed": (scale_in_place, lambda: [torch.randn(3), leaf(3)]),
    "inputs changed": (update_and_view, lambda: [torch.randn(3, 3), torch.randn(3, 3)]),
    "changed out of sight": (scale_unseen, lambda: [torch.randn(3, 3), leaf(3, 3)]),
}


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_text_as_torch(name: str, keep: bool) -> None:
    fn, make = PROGRAMS[name]
    for (role, ours), (_, expected) in zip(
        graphs(compat, fn, make, keep=keep), graphs(theirs, fn, make, keep=keep), strict=True
    ):
        assert ours == expected, role


def test_saved_results_have_no_aliases() -> None:
    (_, forward), (_, backward) = graphs(compat, torch.exp, lambda: [leaf(3)], keep=False)
    assert forward.endswith("return (exp, exp)")
    assert "detach" not in forward + backward


def nodes_of(fn: Any, make: Make) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(graph: fx.GraphModule, _inputs: list[Any]) -> fx.GraphModule:
        found.extend(graph.graph.nodes)
        return graph

    heads = pytree.tree_leaves(compat.aot_function(fn, compat.make_boxed_compiler(note))(*make()))
    torch.autograd.backward(heads, [torch.ones_like(t) for t in heads])
    return found


def test_every_node_has_its_value() -> None:
    for node in nodes_of(lambda x, w: F.layer_norm(x @ w, (4,)).tanh(), lambda: [leaf(3, 4), leaf(4, 4)]):
        if node.op != "output":
            value = node.meta["val"]
            assert isinstance(value, Tensor | tuple | list), node
            if isinstance(value, Tensor):
                assert value.is_meta or value.device.type == "cpu"


def test_nodes_know_the_line_they_come_from() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * 3

    nodes = nodes_of(fn, lambda: [leaf(3)])
    sine = next(n for n in nodes if n.target is torch.ops.aten.sin.default)
    assert "return x.sin() * 3" in sine.meta["stack_trace"]
    tags = {n.name: n.meta.get("partitioner_tag") for n in nodes if n.op == "call_function"}
    assert tags["sin"] == "is_forward"
    assert tags["cos"] == "is_backward"

"""Ways to call: arguments that are no tensors, one output or several, modules, the drop-in names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import programs as p
from .common import Cell, compile_and_keep, extract_graph, verify
from .peer import PEER, api

GRAD = pytest.mark.parametrize("grad", [True, False])


@GRAD
def test_number_and_none_before_the_tensor(grad: bool) -> None:
    def scale(factor: int, _nothing: None, x: Tensor) -> Tensor:
        return factor * x

    verify(scale, lambda: [2, None, torch.randn(3, 3, requires_grad=grad)])


@GRAD
def test_number_and_none_after_the_tensor(grad: bool, entry: Callable[..., Any]) -> None:
    def scale(x: Tensor, _nothing: None, factor: int) -> Tensor:
        return x * factor

    compiled = entry(scale)
    x = torch.randn(3, 3, requires_grad=grad)
    torch.testing.assert_close(compiled(x, None, 3), scale(x, None, 3))


@pytest.mark.differs_from_peer("reuses the graph of the first call, so that no gradient comes back")
def test_grad_need_not_be_the_same_in_every_call(entry: Callable[..., Any]) -> None:
    def scale(x: Tensor, _nothing: None, factor: int) -> Tensor:
        return x * factor

    compiled = entry(scale)
    for grad in (False, True, False):
        x = torch.randn(3, 3, requires_grad=grad)
        out = compiled(x, None, 3)
        torch.testing.assert_close(out, scale(x, None, 3))
        assert out.requires_grad == grad


def _one_with_grad(grad: bool) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(3, 4, requires_grad=grad), torch.randn(3, 4)]


@GRAD
def test_one_output(grad: bool) -> None:
    verify(lambda x, y: x + y, _one_with_grad(grad))


@GRAD
def test_two_outputs(grad: bool) -> None:
    verify(lambda x, y: (x + y, x - y), _one_with_grad(grad))


@GRAD
def test_two_outputs_in_a_list(grad: bool) -> None:
    verify(lambda x, y: [x + y, x - y], _one_with_grad(grad))


@GRAD
def test_change_of_a_squeezed_copy_with_dynamic_shapes(grad: bool) -> None:
    def increment_squeezed(x: Tensor) -> Tensor:
        squeezed = x.clone().squeeze(-1)
        squeezed.add_(1.0)
        return x + squeezed

    verify(increment_squeezed, lambda: [torch.randn(5, 1, requires_grad=grad)], dynamic=True)


def test_complex_module() -> None:
    class Magnitude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4, dtype=torch.complex64)

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self.linear(x).sum()
            return total.abs()

    verify(Magnitude(), lambda: [torch.randn(2, 3, 6, dtype=torch.complex64)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_sparse_gradient_of_an_embedding_seen_through_a_view(dynamic: bool) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(20, 4, sparse=True)

        def forward(self, items: Tensor, starts: Tensor) -> Tensor:
            bags: Tensor = self.table(items, starts)
            return bags.view(-1)

    verify(Bags(), lambda: [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 3])], dynamic=dynamic)


@GRAD
def test_module_with_a_composite_op(grad: bool) -> None:
    verify(nn.Sequential(nn.Linear(3, 5)), p.leaves(1, 2, 3, grad=grad), nonleaf=True)


def test_module_in_inference_mode() -> None:
    with torch.inference_mode():
        verify(nn.Sequential(nn.Linear(3, 5)), p.leaves(1, 2, 3, grad=False), nonleaf=True)


def test_batch_norm_in_eval_writes_nothing() -> None:
    module = nn.BatchNorm2d(3).eval()
    cell = Cell()
    compiled = compile_and_keep(module, cell, keep_inference_input_mutations=True)
    x = torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
    assert "copy_" not in cell.text
    verify(module, lambda: [torch.randn(2, 3, 4, 4)])


# -- the names and conventions of the drop-in ----------------------------------------------------


@pytest.mark.skipif(PEER == "eager", reason="eager has no compiler")
class TestDropIn:
    NAMES = (
        "aot_function aot_module aot_module_simplified compiled_function compiled_module "
        "default_decompositions default_partition get_aot_compilation_context get_graph_being_compiled "
        "make_boxed_compiler make_boxed_func memory_efficient_fusion nop"
    )

    def test_names(self) -> None:
        assert [name for name in self.NAMES.split() if not hasattr(api, name)] == []

    def test_compiled_function_and_module_are_the_same_under_another_name(self) -> None:
        assert api.compiled_function is api.aot_function
        assert api.compiled_module is api.aot_module

    def test_compilers_get_forward_then_backward(self) -> None:
        forward, backward = Cell(), Cell()
        compiled = compile_and_keep(torch.sin, forward, backward=backward)
        x = torch.randn(3, requires_grad=True)
        compiled(x).sum().backward()
        assert len(forward.graphs) == len(backward.graphs) == 1
        assert "tangents_1" in backward.text
        torch.testing.assert_close(x.grad, x.detach().cos())

    def test_backward_compiler_is_the_forward_compiler_unless_given(self) -> None:
        cell = Cell()
        compiled = api.aot_function(torch.sin, extract_graph(cell))
        compiled(torch.randn(3, requires_grad=True)).sum().backward()
        assert len(cell.graphs) == 2

    def test_inference_compiler_is_used_without_grad(self) -> None:
        training, inference = Cell(), Cell()
        compiled = api.aot_function(
            torch.sin, extract_graph(training), inference_compiler=extract_graph(inference)
        )
        compiled(torch.randn(3))
        assert (len(training.graphs), len(inference.graphs)) == (0, 1)
        assert "arg0_1" in inference.text

    def test_boxed_function_may_free_its_arguments(self) -> None:
        seen: list[int] = []

        @api.make_boxed_func
        def boxed(x: Tensor) -> list[Tensor]:
            return [x.sin()]

        def greedy(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
            def run(args: list[Any]) -> Any:
                held = list(args)
                args.clear()
                seen.append(len(held))
                return graph(*held)

            run._boxed_call = True
            return run

        assert boxed._boxed_call
        x = torch.randn(3)
        torch.testing.assert_close(boxed([x]), [x.sin()])
        torch.testing.assert_close(api.aot_function(torch.sin, greedy)(x), x.sin())
        assert seen == [1]

    def test_module_simplified_takes_flat_inputs(self) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 4)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return self.linear(x), x + 1

        module = Both()
        x = torch.randn(2, 3)
        cell = Cell()
        compiled = api.aot_module_simplified(
            module, [x], fw_compiler=extract_graph(cell), bw_compiler=api.nop
        )
        torch.testing.assert_close(list(compiled(x)), list(module(x)))
        compiled(x)[0].sum().backward()
        torch.testing.assert_close(module.linear.bias.grad, torch.full((4,), 2.0))
        assert [n.name for n in cell.last.graph.nodes if n.op == "placeholder"] == [
            "primals_1",
            "primals_2",
            "primals_3",
        ]

    def test_partition_function_makes_the_two_graphs(self) -> None:
        asked: list[str] = []

        @functools.wraps(api.default_partition)
        def partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            asked.extend(n.name for n in joint.graph.nodes if n.op == "placeholder")
            return api.default_partition(joint, inputs, **kwargs)

        x = torch.randn(3, requires_grad=True)
        api.aot_function(torch.sin, api.nop, partition_fn=partition)(x).sum().backward()
        assert asked == ["primals_1", "tangents_1"]
        torch.testing.assert_close(x.grad, x.detach().cos())

    def test_context_names_the_graph_being_compiled(self) -> None:
        names: list[str] = []

        def note(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
            names.append(api.get_graph_being_compiled())
            assert len(api.get_aot_compilation_context()) == 3
            return api.make_boxed_func(graph.forward)

        api.aot_function(torch.sin, note)(torch.randn(3, requires_grad=True)).sum().backward()
        assert ["forward" in name for name in names] == [True, False]
        assert ["backward" in name for name in names] == [False, True]

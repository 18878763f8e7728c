"""Graphs of exports say what they mean, survive passes, and are taken back after a check; other backends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import aheadgrad
from aheadgrad.errors import InvalidProgram
from aheadgrad.export.graph_modules import META
from aheadgrad.program.slots import Gradient, Parameter, UserInput
from aheadgrad.torchlayer import inductor
from tests.export_cases import export

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        self.seen += x.detach().sum(0)
        h = self.linear(x).relu()
        return h.square().mean(), h[0]


def made(**options: Any) -> tuple[Model, aheadgrad.Exported, Tensor]:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 3)
    return model, export(model, (x,), loss="[0]", **options), x


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def test_nodes_are_described_and_stay_so() -> None:
    _, exported, _ = made()
    module = copy.deepcopy(exported.graph_module)
    slots = [n.meta[META].slot for n in placeholders(module)]
    assert slots[0] == Parameter("linear.weight")
    assert slots[-1] == UserInput("x")
    told = module.graph.output_node().meta[META]
    assert [d.slot for d in told] == list(exported.program.signature.outputs)
    assert Gradient(Parameter("linear.bias")) in [d.slot for d in told]
    assert str(placeholders(module)[0].meta[META]) == "parameter linear.weight"
    clone = fx.Graph()
    clone.output(clone.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    assert [n.meta[META].slot for n in clone.nodes if n.op == "placeholder"] == slots


def test_a_graph_that_is_not_changed_comes_back() -> None:
    _, exported, x = made()
    again = exported.from_graph_module(exported.graph_module)
    found, wanted = again.run(x), made()[1].run(x)
    torch.testing.assert_close(found.output, wanted.output, rtol=0, atol=0)
    torch.testing.assert_close(dict(found.gradients), dict(wanted.gradients), rtol=0, atol=0)
    assert again.state is exported.state


def test_a_changed_graph_is_run() -> None:
    """relu becomes tanh; nodes without fake tensors are filled in."""

    def fn(x: Tensor) -> Tensor:
        return x.relu() * 2

    x = torch.randn(3)
    exported = export(fn, (x,))
    module = copy.deepcopy(exported.graph_module)
    (relu,) = module.graph.find_nodes(op="call_function", target=aten.relu.default)
    with module.graph.inserting_before(relu):
        tanh = module.graph.call_function(aten.tanh.default, relu.args)
    relu.replace_all_uses_with(tanh)
    module.graph.erase_node(relu)
    module.recompile()
    changed = exported.from_graph_module(module)
    torch.testing.assert_close(changed.run(x), x.tanh() * 2, rtol=0, atol=0)
    torch.testing.assert_close(exported.run(x), fn(x), rtol=0, atol=0)


def test_unused_inputs_may_go_and_inputs_may_move() -> None:
    model = nn.Linear(3, 3)
    model.spare = nn.Parameter(torch.ones(1))
    x = torch.randn(2, 3)
    exported = export(model, (x,))
    module = copy.deepcopy(exported.graph_module)
    for node in placeholders(module):
        if not node.users:
            module.graph.erase_node(node)
    first, second = placeholders(module)[:2]
    first.prepend(second)
    again = exported.from_graph_module(module)
    torch.testing.assert_close(again.run(x), model(x).detach(), rtol=0, atol=0)


def test_graphs_that_do_not_fit_are_refused() -> None:
    exported = export(lambda x: (x * 2, x.sum()), (torch.randn(3),))

    def changed() -> fx.GraphModule:
        return copy.deepcopy(exported.graph_module)

    module = changed()
    del placeholders(module)[0].meta[META]
    with pytest.raises(InvalidProgram, match="no description"):
        exported.from_graph_module(module)
    module = changed()
    out = module.graph.output_node()
    out.args = ((out.args[0][0],),)  # type: ignore[index]
    with pytest.raises(InvalidProgram, match="returns 1 values; the program returns 2"):
        exported.from_graph_module(module)
    module = changed()
    out = module.graph.output_node()
    out.args = (tuple(reversed(out.args[0])),)  # type: ignore[arg-type]
    with pytest.raises(InvalidProgram, match=r"output 0 was f32\[3\], and is f32\[\]"):
        exported.from_graph_module(module)
    module = changed()
    with module.graph.inserting_before(module.graph.output_node()):
        written = module.graph.call_function(aten.add_.Tensor, (placeholders(module)[0], 1))
    written.meta["val"] = placeholders(module)[0].meta["val"]
    with pytest.raises(InvalidProgram, match="changes its argument"):
        exported.from_graph_module(module)
    other = export(lambda x, y: x * y, (torch.randn(3), torch.randn(3)))
    with pytest.raises(InvalidProgram, match="is no input of this program"):
        exported.from_graph_module(other.graph_module)


def without_copies(exported: Any) -> Any:
    modules = [copy.deepcopy(module) for module in exported.graph_modules]
    for module in modules:
        for node in module.graph.find_nodes(op="call_function", target=aten.clone.default):
            node.replace_all_uses_with(node.args[0])
    return exported.from_graph_module(*modules)


def test_passes_that_take_copies_away_change_nothing() -> None:
    """What has memory of its own by the signature has it, whatever the graph shares."""
    seen, kept = torch.ones(3), {"last": torch.zeros(3)}

    def step(x: Tensor) -> tuple[Tensor, ...]:
        before = seen.clone()
        seen.add_(x)
        kept["last"] = x.clone()
        return before, x.clone(), x * 2, x * 2

    exported = export(step, (torch.ones(3),))
    module = copy.deepcopy(exported.graph_module)
    output = module.graph.output_node()
    *rest, first, second, last = output.args[0]  # type: ignore[misc, union-attr]
    assert first.target is second.target is aten.mul.Tensor  # type: ignore[union-attr]
    output.args = ((*rest, first, first, last),)
    exported = without_copies(exported.from_graph_module(module))
    x = torch.ones(3)
    results = exported.run(x)
    for result in (x, *results):
        result.add_(10)
    assert [int(t[0]) for t in (x, *results)] == [11, 11, 11, 12, 12]
    assert {name: int(t[0]) for name, t in exported.state.items()} == {"seen": 2, "kept['last']": 1}


def test_values_that_a_pass_has_left_as_they_were() -> None:
    exported = export(lambda x: x.sum(0), (torch.randn(2, 3),))
    module = copy.deepcopy(exported.graph_module)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    node.args = (node.args[0], [1])  # its meta["val"] is still that of before
    with pytest.raises(InvalidProgram, match=r"output 0 was f32\[3\], and is f32\[2\]"):
        exported.from_graph_module(module)
    node.args = (node.args[0], [7])
    with pytest.raises(InvalidProgram, match="cannot be run on tensors as the export takes them"):
        exported.from_graph_module(module)


def test_a_graph_with_a_tensor_of_its_own() -> None:
    exported = export(lambda x: x * 2, (torch.randn(3),))
    module = copy.deepcopy(exported.graph_module)
    module.register_buffer("scale", torch.ones(3))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with module.graph.inserting_before(node):
        node.args = (node.args[0], module.graph.get_attr("scale"))
    with pytest.raises(InvalidProgram, match=r"a tensor of its own \(scale\)"):
        exported.from_graph_module(module)


@pytest.mark.parametrize("partition", [None, "min_cut"])
def test_other_backends_run_it(partition: str | None) -> None:
    asked = []

    def backend(request: Any) -> Any:
        asked.append(request.role)
        module = request.module
        return lambda args: list(module(*args))

    model, exported, x = made(partition=partition)
    running = exported.compile(backend)
    found = running(x)
    loss, _ = model(x)
    loss.backward()
    assert len(asked) == len(exported.programs)
    torch.testing.assert_close(found.gradients["linear.weight"], model.linear.weight.grad, rtol=0, atol=0)
    torch.testing.assert_close(exported.state["seen"], model.seen, rtol=0, atol=0)
    running.backward(x)
    torch.testing.assert_close(exported.state["linear.weight"].grad, model.linear.weight.grad)
    torch.testing.assert_close(exported.state["seen"], 2 * model.seen)


@pytest.mark.zoo
@pytest.mark.skipif(inductor.missing("cpu") is not None, reason="no C++ compiler")
@pytest.mark.parametrize("partition", [None, "min_cut"])
def test_inductor_runs_it(partition: str | None) -> None:
    """Its ops are taken apart as Inductor wishes: nothing runs op by op, which would be a warning."""
    model, exported, x = made(partition=partition)
    running = exported.compile("inductor")
    loss, _ = model(x)
    loss.backward()
    found = running(x)
    torch.testing.assert_close(found.output[0], loss.detach())
    torch.testing.assert_close(found.gradients["linear.weight"], model.linear.weight.grad)
    torch.testing.assert_close(exported.state["seen"], model.seen)

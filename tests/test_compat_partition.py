"""Partition functions of the caller's own, in the drop-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from aheadgrad import compat
from aheadgrad.errors import InvalidOption, InvalidProgram
from aheadgrad.options import Options

close = torch.testing.assert_close
Graphs = tuple[fx.GraphModule, fx.GraphModule]


def scale_and_mix(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int]:
    b.add_(1)
    h = (x * b) @ w
    return h.sin(), (h * 2).relu(), x.shape[0]


def change_then_mix(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    h = (x * b) @ w
    return h.sin(), (h * 2).relu()


def make() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True), torch.randn(3, 4)


def assert_same(fn: Callable[..., Any], compiled: Callable[..., Any]) -> None:
    """Outputs, inputs afterwards, and gradients of each output alone and of both together."""
    for heads in ((0,), (1,), (0, 1)):
        for strided in (False, True):
            results = []
            for call in (fn, compiled):
                x, w, b = make()
                out = call(x * 1, w, b)
                tangent = torch.arange(1.0, 16.0)
                tangent = tangent.view(5, 3).t() if strided else tangent.view(3, 5)
                grads = torch.autograd.grad([out[i] for i in heads], [x, w], [tangent] * len(heads))
                results.append((out, grads, b))
            close(results[1], results[0])


def through_default(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Graphs:
    return compat.default_partition(joint, inputs, **kwargs)


def recompute_all(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None
) -> Graphs:
    """Keeps the inputs (and copies of those that change), and computes everything again."""
    nodes = list(joint.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    primals = [n for n in places if n.name.startswith("primals")]
    tangents = [n for n in places if n.name.startswith("tangents")]
    copies = [n for n in nodes if n.target is torch.ops.aten.clone.default]
    copied = [n.args[0] for n in copies]
    kept = [n for n in primals if isinstance(n.meta["val"], Tensor) and n not in copied] + copies
    results = list(joint.graph.output_node().args[0])
    outputs, gradients = results[:num_fwd_outputs], results[num_fwd_outputs:]
    ahead = extract(joint, primals, [*outputs, *kept])
    return ahead, extract(joint, [*kept, *tangents], gradients)


def extract(joint: fx.GraphModule, inputs: list[fx.Node], outputs: list[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = node.meta
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in env and all(n in env for n in node.all_input_nodes):
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[o] if isinstance(o, fx.Node) else o for o in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(joint, graph)


def keep_copies(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Graphs:
    """What is kept are values that the joint graph does not have."""
    forward, backward = compat.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)
    output = forward.graph.output_node()
    results = list(output.args[0])
    for k, node in enumerate(results[num_fwd_outputs:], start=num_fwd_outputs):
        with forward.graph.inserting_before(output):
            results[k] = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
        results[k].meta["val"] = node.meta["val"].clone()
    output.args = (tuple(results),)
    forward.recompile()
    return forward, backward


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("fn", [scale_and_mix, change_then_mix])
@pytest.mark.parametrize("partition_fn", [compat.default_partition, through_default, keep_copies])
def test_same_as_eager(fn: Any, partition_fn: Any, keep: bool) -> None:
    options = {"partition_fn": partition_fn, "keep_inference_input_mutations": keep}
    assert_same(fn, compat.aot_function(fn, compat.nop, **options))


def test_everything_computed_again() -> None:
    def mix(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = (x * b) @ w
        return h.sin(), (h * 2).relu()

    for fn in (mix, change_then_mix):
        assert_same(fn, compat.aot_function(fn, compat.nop, partition_fn=recompute_all))


def test_sizes_are_kept_as_numbers() -> None:
    compiled = compat.aot_function(
        lambda x: (x.sum(0).expand(x.shape[0], 3) * x).reshape(x.shape[0] * 3),
        compat.nop,
        partition_fn=through_default,
        dynamic=True,
    )
    for n in (4, 5, 6):
        x = torch.randn(n, 3, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x).sum(), x)
        close(found, torch.autograd.grad((x.sum(0) * x).sum(), x)[0])
    assert len(compiled.entries) == 1
    assert len(compiled.entries[0].entry.split.all_saved.sizes) == 1


def test_joint_graph_can_be_called_with_primals_and_tangents() -> None:
    called: list[Any] = []

    def check(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Graphs:
        primals, tangents = inputs
        x, w = torch.randn(3, 4), torch.randn(4, 5)
        (out,), grads = joint([x, None, w], [torch.ones(3, 5)])
        called.append((len(primals), len(tangents), kwargs["num_fwd_outputs"]))
        close(out, (x @ w).sin())
        close(grads[2], x.t() @ (x @ w).cos())
        assert grads[1] is None
        return compat.default_partition(joint, inputs, **kwargs)

    compiled = compat.aot_function(lambda x, _n, w: (x @ w).sin(), compat.nop, partition_fn=check)
    compiled(torch.randn(3, 4, requires_grad=True), None, torch.randn(4, 5, requires_grad=True))
    assert called == [(3, 1, 1)]


def test_not_asked_without_a_backward() -> None:
    def never(*_args: Any, **_kwargs: Any) -> Graphs:
        raise AssertionError

    x = torch.randn(3)
    close(compat.aot_function(torch.sin, compat.nop, partition_fn=never)(x), x.sin())


def test_wrong_graphs_are_told_what_they_lack() -> None:
    def without_tangents(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Graphs:
        forward, _backward = compat.default_partition(joint, inputs, **kwargs)
        return forward, forward

    def keeps_a_tuple(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Graphs:
        forward, backward = compat.default_partition(joint, inputs, **kwargs)
        output = forward.graph.output_node()
        output.args = ((*output.args[0], None),)  # type: ignore[misc]
        return forward, backward

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(InvalidProgram, match=r"backward takes 1 values .* tangent of output 0"):
        compat.aot_function(torch.sin, compat.nop, partition_fn=without_tangents)(x)
    with pytest.raises(InvalidProgram, match="keeps None"):
        compat.aot_function(torch.sin, compat.nop, partition_fn=keeps_a_tuple)(x)


def test_unknown_partition_is_refused() -> None:
    with pytest.raises(InvalidOption, match="partition='best'"):
        Options(partition="best")

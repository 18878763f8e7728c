"""The default partition on a bare joint graph, for partition functions that build on it.

Same rule as `default`: the forward computes what the outputs need, whatever of that the backward
uses is kept, and nothing is computed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from aheadgrad.program.effects import has_effect
from aheadgrad.torchlayer.symbols import is_symbolic


def default_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    static_lifetime_input_nodes: Any = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph into a forward and a backward module."""
    graph = joint_module.graph
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    outputs, gradients = results[:num_fwd_outputs], results[num_fwd_outputs:]
    places = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = [n for n in places if n.name.startswith("tangents")]
    primals = [n for n in places if not n.name.startswith("tangents")]
    forward = _forward_nodes(graph, outputs, tangents)
    tensors, sizes = _kept(graph, gradients, {*forward, *primals}, set(tangents))
    ahead = _extract(graph, primals, [*outputs, *tensors, *sizes], forward)
    behind = _extract(graph, [*sizes, *tensors, *tangents], gradients, set(graph.nodes) - forward)
    return fx.GraphModule(joint_module, ahead), fx.GraphModule(joint_module, behind)


def _ancestors(roots: Iterable[Any]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [r for r in roots if isinstance(r, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _forward_nodes(graph: fx.Graph, outputs: list[Any], tangents: list[fx.Node]) -> set[fx.Node]:
    """What the outputs need, what has an effect, and what reads an input that is written to."""
    after: set[fx.Node] = set(tangents)
    effects: list[fx.Node] = []
    written = {n.args[0] for n in graph.nodes if n.meta.get("partitioner_tag") == "must_be_in_forward"}
    stale = set(written)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(n in after for n in node.all_input_nodes):
            after.add(node)
            continue
        reads = any(n in stale for n in node.all_input_nodes)
        if reads:
            stale.add(node)
        later = node.meta.get("partitioner_tag") == "is_backward"
        if reads or (has_effect(node.target) and not later):
            effects.append(node)
    found = {n for n in _ancestors([*outputs, *effects]) if n.op != "placeholder"}
    parts = [n for n in graph.nodes if n.target is operator.getitem and n.args[0] in found]
    return found | set(parts)


def _kept(
    graph: fx.Graph, gradients: list[Any], forward: set[fx.Node], tangents: set[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Tensors and sizes of the forward that the gradients rest on."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    effects = [
        n for n in graph.nodes if n.op == "call_function" and n not in forward and has_effect(n.target)
    ]
    stack = [g for g in [*gradients, *effects] if isinstance(g, fx.Node)]
    while stack:
        node = stack.pop()
        if node in seen or node in tangents:
            continue
        seen.add(node)
        if node.op == "get_attr":
            continue
        if node in forward and not isinstance(node.meta.get("val"), tuple | list):
            found.add(node)
        else:
            stack.extend(node.all_input_nodes)
    ordered = [n for n in graph.nodes if n in found]
    sizes = [n for n in ordered if is_symbolic(n.meta.get("val"))]
    return [n for n in ordered if n not in sizes], sizes


def _extract(graph: fx.Graph, inputs: list[fx.Node], outputs: list[Any], allowed: set[fx.Node]) -> fx.Graph:
    """A graph of its own from `inputs` to `outputs`, in the joint graph's order and names."""
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = made.placeholder(node.name)
        env[node].meta = dict(node.meta)
    effects = [n for n in graph.nodes if n in allowed and n.op == "call_function" and has_effect(n.target)]
    wanted = _ancestors_until([*outputs, *effects], set(inputs))
    for node in graph.nodes:
        if node in wanted and node not in env:
            env[node] = made.node_copy(node, lambda n: env[n])
    made.output(tuple(env[o] if isinstance(o, fx.Node) else o for o in outputs))
    made.output_node().meta = dict(graph.output_node().meta)
    return made


def _ancestors_until(roots: list[Any], boundary: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [r for r in roots if isinstance(r, fx.Node)]
    while stack:
        node = stack.pop()
        if node in found or node in boundary:
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found

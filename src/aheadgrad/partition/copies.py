"""Copies of what a forward keeps for its backward, where the call itself changes it before that.

    keeps primals_2, and the call does primals_2.add_(1)    ->    keeps clone(primals_2), made at the start

A backward may also write to such an input. Then it needs both: the input, to write to it, and the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aheadgrad.torchlayer.dispatch import is_mutable, is_view_op
from aheadgrad.torchlayer.symbols import is_symbolic

_CLONE = torch.ops.aten.clone.default


def keep_copies(forward: fx.GraphModule, backward: fx.GraphModule, exits: int, changed: set[int]) -> set[str]:
    """Edits both graphs; returns the names of the copies. `changed`: numbers of inputs that change."""
    if not changed:
        return set()
    results = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    outputs, kept = results[:exits], results[exits:]
    tensors = [n for n in kept if not _is_size(n)]
    sizes = kept[len(tensors) :]
    given = [n for n in forward.graph.nodes if n.op == "placeholder"]
    taken = [n for n in backward.graph.nodes if n.op == "placeholder"]
    places = taken[len(sizes) : len(sizes) + len(tensors)]
    moving = {given[i] for i in changed}
    copies: set[str] = set()
    last = places[-1] if places else None
    for k, (node, place) in enumerate(list(zip(tensors, places, strict=True))):
        if not isinstance(node, fx.Node) or _whole(node) not in moving:
            continue
        readers = [user for user in place.users if not _writes_to(user, place)]
        if not readers:
            continue
        copy = _copied(forward.graph, node)
        copies.add(copy.name)
        if len(readers) == len(place.users):
            tensors[k] = copy
            continue
        assert last is not None
        with backward.graph.inserting_after(last):
            last = backward.graph.placeholder(copy.name)
        last.meta = dict(place.meta)
        tensors.append(copy)
        for user in readers:
            user.replace_input_with(place, last)
    forward.graph.output_node().args = ((*outputs, *tensors, *sizes),)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return copies


def _is_size(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return is_symbolic(value) or isinstance(value, int | float)


def _whole(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while node.op == "call_function" and is_view_op(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _writes_to(user: fx.Node, place: fx.Node) -> bool:
    others = [*user.args[1:], *user.kwargs.values()]
    return is_mutable(user.target) and user.args[0] is place and all(v is not place for v in others)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A copy of a node's value as it is first. Views of inputs are made at once, as nothing precedes them."""
    last = node
    if node.op == "placeholder":
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        copy = graph.call_function(_CLONE, (node,))
    copy.meta = dict(node.meta)
    return copy

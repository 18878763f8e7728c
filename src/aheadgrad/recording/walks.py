"""Walks through autograd's histories: what lies behind an output, and what it has in common with others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

from torch import Tensor

from aheadgrad.recording.histories import holds_something, in_order
from aheadgrad.recording.told_by_name import ENTERED

Edge = tuple[Any, int]


def edge_of(t: Any) -> Edge:
    return t.grad_fn, t.output_nr


@dataclass(eq=False)
class Walk:
    """What lies behind an output: autograd's nodes, their edges, leaves, and edges not followed."""

    nodes: set[Any] = field(default_factory=set)
    edges: set[Edge] = field(default_factory=set)
    leaves: list[Tensor] = field(default_factory=list)
    entered: set[Any] = field(default_factory=set)  # inputs that have a history themselves
    ends: dict[Edge, None] = field(default_factory=dict)


def walk(start: Edge, ends: Collection[Edge] = (), closed: Collection[Any] = ()) -> Walk:
    """Follows a history back to its leaves, not beyond these edges, and not into these nodes."""
    found = Walk()
    stack = [start]
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node is None:
            continue
        if edge in ends or node in closed:
            found.ends[edge] = None
            continue
        found.edges.add(edge)
        if node in found.nodes:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.leaves.append(variable)
            continue
        (found.entered if type(node).__name__ == ENTERED else found.nodes).add(node)
        stack.extend(node.next_functions)
    return found


def leaves_behind(nodes: Iterable[Any]) -> frozenset[int]:
    """The leaves that nodes lead to, by their ids."""
    edges = (edge[0] for node in nodes for edge in node.next_functions)
    return frozenset(id(leaf) for node in edges if (leaf := getattr(node, "variable", None)) is not None)


def lead_elsewhere(nodes: Collection[Any], leaves: Collection[int], ends: Collection[Edge]) -> list[Any]:
    """The nodes that lead neither to these leaves nor to these edges: but to leaves made inside, or to
    nothing (of views made under no_grad, which require grad as their bases do). A backward for given inputs
    does not come by them, one for all leaves does."""
    leading: set[Any] = set()

    def leads(edge: Edge) -> bool:
        node = edge[0]
        if type(node).__name__ == ENTERED:
            node = node.next_functions[0][0]
        return node in leading or edge in ends or id(getattr(node, "variable", None)) in leaves

    found = []
    for node in in_order(nodes):
        if any(map(leads, node.next_functions)):
            leading.add(node)
        else:
            found.append(node)
    return found


def groups_of(walks: Mapping[int, Walk], one_node: bool = False) -> list[list[int]]:
    """Outputs that have nodes in common."""
    groups: list[tuple[list[int], set[Any]]] = []
    for i, found in walks.items():
        members, nodes = [i], found.nodes
        rest = []
        for group in groups:
            if one_node or group[1] & nodes:
                members, nodes = group[0] + members, group[1] | nodes
            else:
                rest.append(group)
        groups = [*rest, (members, nodes)]
    return [sorted(members) for members, _ in groups]


Users = Mapping[Any, frozenset[int]]
"""Which outputs lead to a node. Where these differ, one may go back and the others not."""


def users_of(walks: Mapping[int, Walk]) -> Users:
    found: dict[Any, set[int]] = {}
    for i, w in walks.items():
        for node in w.nodes:
            found.setdefault(node, set()).add(i)
    return {node: frozenset(users) for node, users in found.items()}


def can_be_told_apart(group: Mapping[int, Edge], walks: Mapping[int, Walk]) -> bool:
    """Would it be noticed if a backward of one of these outputs came by the history of another?

    It would if they lead to different inputs, whose history is visited; if one can go back after the other,
    since what they have in common holds nothing that the first one frees; and if a third one comes from the
    same op as the first, so that its hooks are called by both. (Hooks of leaves: `torchlayer/hooks`.)
    """
    for i, edge in group.items():
        siblings = [j for j in group if j != i and edge[0] in walks[j].nodes and edge not in walks[j].edges]
        if siblings and len(siblings) < len(group) - 1:
            return True
    if any(walks[i].entered != walks[j].entered for i, j in pairwise(group)):
        return True
    holding = {n for n in {n for i in group for n in walks[i].nodes} if holds_something(n)}
    own = [walks[i].nodes & holding for i in group]
    return any(a and b and not a & b for a, b in combinations(own, 2))


def borders(users: Users) -> Iterator[Edge]:
    """Where nodes of some outputs lead to nodes of more."""
    found: dict[Edge, None] = {}
    for node in in_order(users):
        for edge in node.next_functions:
            if users.get(edge[0], users[node]) != users[node]:
                found[edge] = None
    yield from found

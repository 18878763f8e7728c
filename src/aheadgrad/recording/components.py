"""Components: which outputs share a backward, and where one backward hands over to another.

Outputs whose histories have nothing in common form separate components. So do an output and what
was computed from it: in

    h = x * w
    return h, h.sin()

the second component ends at `h`, which is one of its inputs; there eager's users find a gradient
(`retain_grad`, hooks, `autograd.grad(out, h)`), and so do ours. Where a component needs another
value of the one below, which is no output, the two meet in a passage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from aheadgrad.program.slots import Between
from aheadgrad.recording.exits import Exit, GrownView
from aheadgrad.recording.geometry import contiguous_strides
from aheadgrad.recording.histories import holds_something
from aheadgrad.recording.told_by_name import HOOK_OF_MODULE
from aheadgrad.recording.walks import (
    Edge,
    Users,
    Walk,
    borders,
    can_be_told_apart,
    edge_of,
    groups_of,
    users_of,
    walk,
)
from aheadgrad.torchlayer.autograd import edge_metadata, nodes_without_backward, runs_python


@dataclass(frozen=True, eq=False)
class Target:
    """Something a gradient is taken of: an input, a tensor inside of one, a leaf made inside, an output that
    another component computes ("exit") or that is a view of such ("view"), or (from the second order on) a
    tangent of the order before.

    `name` is what a tensor inside of an input is called in generated code.
    """

    kind: str
    index: int
    leaf: Any
    name: str = ""

    @property
    def place(self) -> Any:
        """Where autograd finds it."""
        return GradientEdge(*edge_of(self.leaf)) if self.is_boundary else self.leaf

    @property
    def is_boundary(self) -> bool:
        return self.kind in ("exit", "view", "member")


@dataclass(frozen=True, eq=False)
class Passage:
    """An intermediate that nobody sees, where one component ends and another begins."""

    grad_fn: Any
    output_nr: int
    shape: tuple[Any, ...]
    dtype: Any
    device: Any

    def size(self) -> tuple[Any, ...]:
        return self.shape

    def stride(self) -> tuple[Any, ...]:
        return contiguous_strides(self.shape)

    def dim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class Component:
    """Outputs with a common history, and the inputs they lead back to."""

    exits: list[int]
    targets: list[Target]
    nodes: set[Any] = field(default_factory=set)
    other_leaves: list[Tensor] = field(default_factory=list)
    nodes_of: dict[int, set[Any]] = field(default_factory=dict)
    beyond: set[Any] = field(default_factory=set)  # nodes behind its ends that a backward comes by

    @property
    def boundary(self) -> list[Target]:
        return [t for t in self.targets if t.is_boundary]

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, a backward ends where the component ends.

        The engine goes on where a wanted leaf lies behind an end too. No gradient is not enough to stop it:
        formulas with several gradients may make some out of none.
        """
        ends: dict[Any, set[int]] = {}
        for t in self.boundary:
            node, number = edge_of(t.leaf)
            ends.setdefault(node, set()).add(number)
        hooks = [node.register_prehook(partial(_without, numbers)) for node, numbers in ends.items()]
        custom = [node for node in self.beyond if runs_python(node)]
        hooks += [node.register_hook(_nothing) for node in self.beyond if not runs_python(node)]
        try:
            with nodes_without_backward(custom):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _without(numbers: set[int], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if k in numbers else g for k, g in enumerate(grads))


def _nothing(grads: tuple[Any, ...], _: Any) -> tuple[None, ...]:
    return (None,) * len(grads)


class Components:
    """Groups the outputs; `exits` grows by the passages between components."""

    def __init__(self, exits: list[Exit], targets: list[Target]) -> None:
        self.exits = exits
        self.targets = targets
        self.views: dict[Edge, Target] = {}
        self.entered: list[Edge] = []
        self.before: set[int] = set()  # changed inputs that are needed as they were, too
        self.ends = {edge_of(t.leaf): t for t in targets if t.is_boundary}

    def find(
        self, *, one_node: bool, cut: int, join: bool, views: Sequence[GrownView] = ()
    ) -> list[Component]:
        """`cut`: outputs that others were computed from are in components of their own, unless more than so
        many follow upon each other. `join`: outputs whose history holds nothing that a backward frees go with
        others that lead to the same inputs.

        So are inputs that are changed, unless something else needs them both as they were and as they are.
        """
        own = len(self.exits)
        while True:
            components = self._find(one_node=one_node, cut=cut, join=join, views=views)
            torn = _torn(self.exits, components) if cut else set()
            if not torn:
                return components
            again = {i for i in torn if self.exits[i].updates in self.before}
            self.before |= {self.exits[i].updates for i in torn}  # type: ignore[misc]
            for i in again:
                self.exits[i].handed_out, self.exits[i].updates = False, None
            views = [v for v in views if v.root not in {self.exits[i].slot for i in again}]
            del self.exits[own:]
            self.views.clear()

    def _find(self, *, one_node: bool, cut: int, join: bool, views: Sequence[GrownView]) -> list[Component]:
        exits = self.exits
        differentiable = [i for i, e in enumerate(exits) if e.differentiable]
        unreachable = [] if one_node else [i for i in differentiable if exits[i].unreachable]
        reachable = [i for i in differentiable if i not in unreachable]
        walks = {i: walk(edge_of(exits[i].traced), self.ends) for i in reachable}
        levels: dict[int, int] = {}
        components = []
        users = users_of(walks)
        whole = one_node or any(map(_hooked, walks.values()))
        if not whole and max(_levels(exits, walks, users).values(), default=0) < cut:
            self._use_views(views, walks)
            walks |= self._part(walks, cut)
            levels = _levels(exits, walks, users)
        if any(levels.values()) or self.views:
            components = self._cut(levels, users)
        else:
            groups = groups_of(walks, one_node)
            components = [self._component(m, walks) for m in (_joined(groups, walks) if join else groups)]
        components += [Component([i], [], nodes_of={i: set()}) for i in unreachable]
        order = {id(c): levels.get(c.exits[0], 0) for c in components}
        return sorted(components, key=lambda c: (order[id(c)], c.exits[0]))

    def _component(self, members: list[int], walks: dict[int, Walk]) -> Component:
        leaves = {id(leaf): leaf for i in members for leaf in walks[i].leaves}
        ends = {id(self.ends[e].leaf) for i in members for e in walks[i].ends if e in self.ends}
        wanted = [t for t in self.targets if id(t.leaf) in (ends if t.is_boundary else leaves)]
        known = {id(t.leaf) for t in self.targets}
        others = [leaf for key, leaf in leaves.items() if key not in known]
        nodes = {n for i in members for n in walks[i].nodes}
        component = Component(members, wanted, nodes, others, {i: walks[i].nodes for i in members})
        component.beyond = beyond(component)
        return component

    def _use_views(self, views: Sequence[GrownView], walks: dict[int, Walk]) -> None:
        """Notes the views that outputs were computed from. Their roots have to be made before."""
        for view in views:
            edge = edge_of(view.traced)
            users = [found.edges for found in walks.values() if edge in found.edges]
            root = None
            if view.root is not None:
                root = next(e for e in self.exits if e.slot == view.root)
                if not root.differentiable or any(edge_of(root.traced) not in edges for edges in users):
                    continue
            if users:
                self.views[edge] = Target("view", view.output, view.traced)
                if root is not None:
                    root.handed_out = True

    def _part(self, walks: dict[int, Walk], most: int) -> dict[int, Walk]:
        """Passages into what outputs have in common, where a backward of one must not come by the others."""
        found: dict[int, Walk] = {}
        ends = {*self.ends, *self.views}
        short = {i: walk(edge_of(self.exits[i].traced), ends) for i in walks}
        taken = {edge_of(self.exits[i].traced) for i in walks if self.exits[i].handed_out}
        self.entered = self._entered(walks)
        for edge in self.entered:
            found[self._passage(edge)] = walk(edge)
        for group in groups_of(short):
            users = users_of({i: short[i] for i in group})
            edges = {i: edge_of(self.exits[i].traced) for i in group}
            if len(set(users.values())) > most or not can_be_told_apart(edges, short):
                continue
            for edge in borders(users):
                if edge not in taken and edge not in ends:
                    found[self._passage(edge)] = walk(edge, self.ends)
        return found

    def _entered(self, walks: dict[int, Walk]) -> list[Edge]:
        """Where changed inputs come in, as they were."""
        leaves = {id(t.leaf) for t in self.targets if t.kind == "input" and t.index in self.before}
        nodes = {node: None for w in walks.values() for node in w.entered}
        return [(node, 0) for node in nodes if id(node.next_functions[0][0].variable) in leaves]

    def _cut(self, levels: dict[int, int], users: Users) -> list[Component]:
        """From the outputs that rest on no others upwards: what a component has, those above end at."""
        owners: dict[Any, Component] = {}
        known: dict[Edge, int] = {}
        for i in sorted(levels, key=lambda i: not self.exits[i].handed_out):
            known.setdefault(edge_of(self.exits[i].traced), i)
        components: list[Component] = []
        for level in range(max(levels.values()) + 1):
            members = [i for i in levels if levels[i] == level]
            starts = {i: edge_of(self.exits[i].traced) for i in members}
            ends = {*self.views, *self.entered, *self.ends}
            walks = {i: walk(e, ends - {e}, owners) for i, e in starts.items()}
            made = []
            for group in self._together(groups_of(walks), users):
                component = self._component(group, walks)
                for edge in {e: None for i in group for e in walks[i].ends if e not in self.ends}:
                    if edge in self.views:
                        component.targets.append(self.views[edge])
                        continue
                    if edge not in known:
                        known[edge] = self._passage(edge)
                        owner = owners[edge[0]]
                        owner.exits.append(known[edge])
                        owner.nodes_of[known[edge]] = walk(edge).nodes & owner.nodes
                    index = known[edge]
                    component.targets.append(Target("exit", index, self.exits[index].traced))
                component.beyond = beyond(component)
                made.append(component)
            owners.update({node: c for c in made for node in c.nodes})
            components += made
        return components

    def _together(self, groups: list[list[int]], users: Users) -> list[list[int]]:
        """The same groups, those joined that no backward gets to one by one."""
        found: dict[frozenset[int], list[int]] = {}
        for group in groups:
            node, _ = edge_of(self.exits[group[0]].traced)
            found.setdefault(users.get(node) or frozenset(group), []).extend(group)
        return [sorted(group) for group in found.values()]

    def _passage(self, edge: Edge) -> int:
        passage = Passage(*edge, *edge_metadata(*edge))
        self.exits.append(Exit(Between(len(self.exits)), passage, None, True, handed_out=True))
        return len(self.exits) - 1


def _torn(exits: list[Exit], components: list[Component]) -> set[int]:
    """Changed inputs at which a component ends that leads to them as they were, too; or a later one does."""
    found = set()
    for i, e in enumerate(exits):
        if e.updates is None:
            continue
        late = False
        for c in components:
            late = late or any(_rests_on(t, i, exits) for t in c.boundary)
            if late and any(t.kind == "input" and t.index == e.updates for t in c.targets):
                found.add(i)
    return found


def _rests_on(target: Target, i: int, exits: list[Exit]) -> bool:
    """Is this a changed input, or a view of it?"""
    if target.kind == "exit":
        return target.index == i
    edge = edge_of(exits[i].traced)
    return exits[i].differentiable and edge in walk(edge_of(target.leaf)).edges


def _joined(groups: list[list[int]], walks: dict[int, Walk]) -> list[list[int]]:
    """The same groups, but those that hold nothing joined with another that leads to the same leaves."""
    leaves = [{id(leaf) for i in members for leaf in walks[i].leaves} for members in groups]
    light = [not any(runs_python(n) or holds_something(n) for i in g for n in walks[i].nodes) for g in groups]
    for k in range(len(groups)):
        others = [j for j, g in enumerate(groups) if g and j != k and leaves[j] & leaves[k]]
        if light[k] and others:
            j = min(others, key=light.__getitem__)
            groups[j], leaves[j] = sorted(groups[j] + groups[k]), leaves[j] | leaves[k]
            groups[k] = []
    return [members for members in groups if members]


def _levels(exits: list[Exit], walks: dict[int, Walk], users: Users) -> dict[int, int]:
    """How many outputs, one computed from the other, each output rests on; those with the same users are on
    one level."""
    edges: dict[Edge, int] = {}
    kinds: dict[frozenset[int], list[int]] = {}
    for i in walks:
        edge = edge_of(exits[i].traced)
        if exits[i].handed_out:
            edges.setdefault(edge, i)
        kind = users.get(edge[0]) or frozenset(j for j, w in walks.items() if edge in w.edges)
        kinds.setdefault(kind, []).append(i)
    levels: dict[int, int] = {}
    for members in (kinds[k] for k in sorted(kinds, key=lambda k: (-len(k), sorted(k)))):
        known = {b for edge, b in edges.items() if any(edge in walks[i].edges for i in members)}
        level = max((levels[b] + 1 for b in known.difference(members)), default=0)
        levels |= dict.fromkeys(members, level)
    return {i: levels[i] for i in walks}


def beyond(component: Component) -> set[Any]:
    wanted = {id(t.leaf) for t in component.targets} | {id(leaf) for leaf in component.other_leaves}
    ends = [edge_of(t.leaf) for t in component.boundary]
    nodes: set[Any] = set()
    for end in ends:
        found = walk(end)
        if any(id(leaf) in wanted for leaf in found.leaves) or any(
            e in found.edges for e in ends if e != end
        ):
            nodes |= found.nodes
    return nodes - component.nodes


def _hooked(found: Walk) -> bool:
    """Are there hooks of modules, which are called whether or not there is a gradient?"""
    return any(type(n).__name__ == HOOK_OF_MODULE for n in found.nodes)

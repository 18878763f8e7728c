"""Ways back from a node to its inputs, for backwards that are differentiated themselves.

A differentiable backward needs the node's inputs as tensors with their history. Two kinds are at
hand for free: inputs that the node saves anyway, and leaves, which autograd keeps. For any other
input the node gets one more output, a link: as large as the input, but without memory of its own
(all strides are 0). What arrives there as a tangent is a gradient of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.torchlayer.autograd import size_in_history
from aheadgrad.torchlayer.subclasses import build, form_of, is_foreign, parts_of
from aheadgrad.torchlayer.wanted import LEAF

NOTHING = torch.empty(0)
_links: dict[Any, Tensor] = {}
_MOST_LINKS = 1024


def _is_inner(edge: Any) -> bool:
    """Does an edge lead to something that is no leaf?"""
    return edge is not None and edge.__class__ is not LEAF


@dataclass(frozen=True)
class Ways:
    """For each input that a node leads to: its position among the node's tensors, and where it is saved.

    `carried` has the position among saved tensors, None where the input is not saved itself;
    `reshaped` tells whether the call changes the shape of an input.
    """

    positions: tuple[int, ...]
    carried: tuple[int | None, ...]
    reshaped: bool = False

    @property
    def loose(self) -> list[int]:
        """The inputs that need a link when they are no leaves."""
        return [k for k, j in enumerate(self.carried) if j is None]

    def linked(self, ctx: Any) -> list[int]:
        """The inputs that got a link in this call."""
        edges = ctx.next_functions
        return [k for k in self.loose if _is_inner(edges[self.positions[k]][0])]

    def passed_on(self, outputs: int) -> Callable[[Any, int], Any]:
        """The edge that a link leads on to, None for one of so many outputs of its own."""

        def passes_on(node: Any, output: int) -> Any:
            if output < outputs:
                return None
            return node.next_functions[self.positions[self.linked(node)[output - outputs]]]

        return passes_on

    def inputs(self, ctx: Any, saved: Any, links: Any) -> list[Tensor]:
        """The inputs with their history; `saved` and `links` are what the node saved."""
        edges = ctx.next_functions
        rest = iter(links)
        found: list[Tensor] = []
        for position, j in zip(self.positions, self.carried, strict=True):
            edge = edges[position][0]
            if j is not None:
                found.append(saved[j])
            elif edge is None:  # it requires grad no longer (`detach_`): anything without grad will do
                found.append(NOTHING)
            else:
                found.append(next(rest) if _is_inner(edge) else edge.variable)
        return found

    def add(self, ctx: Any, grads: list[Any], tangents: tuple[Tensor | None, ...]) -> list[Any]:
        """Adds what came through links to the gradients."""
        for k, t in zip(self.linked(ctx), tangents, strict=True):
            if t is not None:
                grads[k] = t if grads[k] is None else grads[k] + t
        return grads


def link(ctx: Any, outs: tuple[Any, ...], saved: tuple[Any, ...], inputs: tuple[Tensor, ...]) -> Any:
    """Saves, and returns the outputs with a link for each of these inputs that is no leaf."""
    links = []
    for t in inputs:
        if not t.is_leaf:
            known = _links.get((t.shape, t.dtype, t.device)) if t.__class__ is Tensor else None
            links.append(_link(t, t.shape) if known is None else known.detach())
    return _returned(ctx, outs, saved, links)


def link_to_edges(ctx: Any, outs: tuple[Any, ...], saved: tuple[Any, ...], inputs: tuple[Tensor, ...]) -> Any:
    """As `link`, where the call changes the shape of inputs: links are as large as their history says."""
    links = [_link(t, tuple(size_in_history(t))) for t in inputs if not t.is_leaf]
    return _returned(ctx, outs, saved, links)


def _link(t: Tensor, size: Any) -> Tensor:
    if is_foreign(t):  # numbers inside (the offsets of a jagged tensor) say what it is
        parts = (_link(p, p.shape) if p.is_floating_point() or p.is_complex() else p for p in parts_of(t))
        return build(form_of(t), parts).detach()
    key = size, t.dtype, t.device
    known = _links.get(key)
    if known is None:
        known = torch.empty_strided(size, (0,) * len(size), dtype=t.dtype, device=t.device)
        if known.__class__ is not Tensor or known.is_inference() or len(_links) >= _MOST_LINKS:
            return known
        _links[key] = known
    return known.detach()


def _returned(ctx: Any, outs: tuple[Any, ...], saved: tuple[Any, ...], links: list[Tensor]) -> Any:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved, *links)
    return (*outs, *links)

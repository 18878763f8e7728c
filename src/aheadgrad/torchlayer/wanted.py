"""Which of a node's gradients the running backward wants.

The engine tells: it is asked for each input whether it will go there. Its answer for a leaf that
`autograd.grad` wants is an error, which takes 20 µs. So what the caller of the backward asked for serves as a
hint, where the caller is to be seen: nothing in particular means everything, and of leaves it wants those
that it names. Of everything else the engine says so.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from aheadgrad.torchlayer.autograd import running_backward

Wanted = tuple[bool, ...] | None
"""Of each input, or None: all of them."""

_frame = sys._getframe
_CALLER = _engine_run_backward.__code__
LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
will_run = _will_run = torch._C._will_engine_execute_node
"""Will the running backward get to a node? Not to be asked of leaves."""
_MOST_ERRORS = 4  # then the other leaves count as wanted
_ALL = frozenset[int]()


class _Last(threading.local):
    """The backward that this thread saw last, and what it is to find gradients of (None: not known)."""

    seen: tuple[int, frozenset[int] | None] = -1, None


_last = _Last()


def wanted_inputs(node: Any, positions: tuple[int, ...]) -> Wanted:
    """Which of the inputs at these positions are wanted. For the backward of a node to call, itself.

    The node may know the leaves among these inputs (`leaves`, with None for others; `inner` are the places of
    those), and knows them then.
    """
    task = running_backward()  # threads count by themselves
    last, named = _last.seen
    if last != task:
        named = _asked_for(task)
    if named is _ALL:
        return None
    if named is None:
        return _asked_one_by_one(node, positions)
    leaves = node.leaves
    if leaves is None:
        leaves = find_leaves(node, positions)
    found = tuple(map(named.__contains__, map(id, leaves)))
    if False not in found:
        return None
    if node.inner:
        edges, told = node.next_functions, list(found)
        for k in node.inner:
            told[k] = _goes_to(*edges[positions[k]])
        return tuple(told) if False in told else None
    return found


def find_leaves(node: Any, positions: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    """The leaves among the inputs at these positions, which the node knows from now on."""
    edges = node.next_functions
    leaves = node.leaves = tuple(
        [edge.variable if (edge := edges[p][0]).__class__ is LEAF else None for p in positions]
    )
    node.inner = places_of_none(leaves)
    return leaves


def places_of_none(leaves: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return tuple([k for k, leaf in enumerate(leaves) if leaf is None])


def accumulates() -> bool:
    """Does the running backward go to all leaves? For the backward of a node to call, itself."""
    task = running_backward()
    last, named = _last.seen
    return (named if last == task else _asked_for(task)) is _ALL


def _asked_for(task: int) -> frozenset[int] | None:
    """The tensors that a backward is to find gradients of, if its caller is to be seen: right above the frame
    of a node's backward, which is two above this one."""
    named = None
    try:
        caller = _frame(3)
    except ValueError:  # in another thread
        caller = None
    if caller is not None and caller.f_code is _CALLER:
        inputs = caller.f_locals["args"][3]
        if not inputs:
            named = _ALL
        elif GradientEdge not in set(map(type, inputs)):  # which may name a leaf without its tensor
            named = frozenset(map(id, inputs))
    _last.seen = task, named
    return named


def _goes_to(node: Any, output: int) -> bool:
    """Does the engine go there? Where an output only passes on what comes to it, further on from there."""
    while output and (passes_on := getattr(node, "passes_on", None)) is not None:
        edge = passes_on(node, output)
        if edge is None:
            break
        node, output = edge
    try:
        return node is not None and _will_run(node)
    except RuntimeError:
        return True


def _asked_one_by_one(node: Any, positions: tuple[int, ...]) -> Wanted:
    """For a backward whose caller is not to be seen."""
    edges = node.next_functions
    found: list[bool] = []
    errors = 0
    for position in positions:
        edge, output = edges[position]
        if type(edge) is not LEAF:
            found.append(_goes_to(edge, output))
        elif errors == _MOST_ERRORS:
            found.append(True)
        else:
            try:
                found.append(_will_run(edge))
            except RuntimeError:
                found.append(True)
                errors += 1
            else:
                if found[-1]:
                    return None  # gradients are accumulated: in all leaves
    return None if all(found) else tuple(found)

"""Which of a node's gradients the running backward wants.

The engine tells: it is asked for each input whether it will go there. Its answer for a leaf that
`autograd.grad` wants is an error, which takes 20 µs. So what the caller of the backward asked for serves as a
hint, where the caller is to be seen: nothing in particular means everything, and leaves that it names need no
question. Whatever else counts as unwanted, the engine has said so.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

Wanted = tuple[bool, ...] | None
"""Of each input, or None: all of them."""

_CALLER = _engine_run_backward.__code__
_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
will_run = _will_run = torch._C._will_engine_execute_node
"""Will the running backward get to a node? Not to be asked of leaves."""
_MOST_ERRORS = 4  # then the other leaves count as wanted


def wanted_inputs(node: Any, positions: tuple[int, ...]) -> Wanted:
    """Which of the inputs at these positions are wanted. For the backward of a node to call, itself."""
    frame = sys._getframe(2).f_back  # after the backward and what calls it: the caller, if in this thread
    named: set[int] | None = None
    if frame is not None and frame.f_code is _CALLER:
        inputs = frame.f_locals["args"][3]
        if not inputs:
            return None
        named = {id(t) for t in inputs if isinstance(t, Tensor)}
    edges = node.next_functions
    found: list[bool] = []
    errors = 0
    for position in positions:
        edge = edges[position][0]
        if edge is None:
            found.append(False)
        elif type(edge) is not _LEAF:
            found.append(_will_run(edge))
        elif (named is not None and id(edge.variable) in named) or errors == _MOST_ERRORS:
            found.append(True)
        else:
            try:
                goes_there = _will_run(edge)
            except RuntimeError:
                goes_there = True
                errors += 1
            else:
                if goes_there and named is None:
                    return None  # gradients are accumulated: in all leaves
            found.append(goes_there)
    return None if all(found) else tuple(found)

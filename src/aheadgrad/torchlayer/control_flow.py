"""Control-flow operators and effects: what surrounds them in torch.

`cond`, `map`, `scan` and `while_loop` are compiled by Dynamo before they run, which cannot be done inside a
trace. Ops with ordered effects must run even if nobody uses their results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aheadgrad.errors import FallbackError
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.lock import here, must_be_held

__all__ = ["auto_functionalized", "bodies_not_compiled", "is_effectful", "with_graphs"]


def auto_functionalized() -> Any:
    """Stands for an op that changes its arguments: `(op, **arguments) -> results, new values`."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized as operator

    return operator


_effects: dict[Any, bool] = {}


def is_effectful(op: Any) -> bool:
    """Was the op registered as one whose calls must stay, and stay in order?"""
    known = _effects.get(op)
    if known is None:
        known = _has_effect(op)
        if known or not _is_custom(op):  # a custom op may be registered later
            _effects[op] = known
    return known


def _is_custom(op: Any) -> bool:
    return getattr(op, "namespace", "aten") not in ("aten", "prims", "prim")


def _has_effect(op: Any) -> bool:
    if not _is_custom(op):
        return False
    from torch._higher_order_ops import effects

    find = getattr(effects, "_get_effect", None)
    if find is not None:
        return find(op) is not None
    return op in getattr(effects, "SIDE_EFFECTS", {})


class _Body:
    """A function given to a control-flow operator, with the arguments that it was called with."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.given: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> Any:
        self.given = args
        return self.function(*args)


def with_graphs(
    mode: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Runs a control-flow operator on fake tensors; its arguments with graphs in place of functions."""
    bodies = [_Body(a) if _is_function(a) else a for a in args]
    with mode, _with_shapes(mode):
        if not any(isinstance(b, _Body) for b in bodies):
            out = op(*args, **kwargs)
            mode.shape_env.pending_fresh_unbacked_symbols.clear()  # the sizes of results, if any
            return args, out
        try:
            out = op(*bodies, **kwargs)
            given = next((b.given for b in bodies if isinstance(b, _Body) and b.given), None)
            return tuple(_graph_of(op, b, given) if isinstance(b, _Body) else b for b in bodies), out
        except (AssertionError, AttributeError) as error:  # of torch's, on tensors from elsewhere
            raise FallbackError(f"a function given to {op} cannot be recorded by itself") from error


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(
        value, torch.fx.GraphModule | torch._ops.OpOverload | torch.Tensor
    )


def _graph_of(op: Any, body: _Body, given: tuple[Any, ...] | None) -> Any:
    """`given`: what another function of the operator was called with, if this one was not called."""
    from torch.fx.experimental.proxy_tensor import make_fx

    given = body.given or given
    if given is None:
        raise FallbackError(f"the functions given to {op} cannot be recorded")
    graph = make_fx(body.function)(*given)
    held = [v for v in (*graph.__dict__.values(), *graph._buffers.values()) if isinstance(v, torch.Tensor)]
    if held:
        raise FallbackError(f"a function given to {op} closes over a tensor")
    return graph


@contextmanager
def bodies_not_compiled() -> Iterator[None]:
    """While this is on, control-flow operators run without being compiled by Dynamo first.

    Dynamo would refuse to under a dispatch mode, remember that it did, and break later calls.
    """
    must_be_held()
    original = torch.compile
    is_here = here()

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is not None and options.get("fullgraph") and is_here() and _in_operator():
            return _with_flat_operands(model) if model.__name__ == "_cond_op_wrapper" else model
        return original(model, **options)

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = original


def _with_flat_operands(cond: Any) -> Any:
    """As Dynamo would call it."""

    def call(pred: Any, true: Any, false: Any, operands: Any) -> Any:
        flat, spec = pytree.tree_flatten(operands)
        both = [lambda *args, f=f: f(*pytree.tree_unflatten(args, spec)) for f in (true, false)]
        return cond(pred, *both, tuple(flat))

    return call


def _in_operator() -> bool:
    from torch._higher_order_ops import utils

    return bool(getattr(utils._hop_compile_tls, "in_hop_compile", False))


@contextmanager
def _with_shapes(mode: Any) -> Iterator[None]:
    """Operators that run a number of times not known ask for an environment of symbolic sizes."""
    before = mode.shape_env
    if before is None:
        mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        mode.shape_env = before

"""A graph of Dynamo's as text: the whole of what is recorded, as long as it calls nothing but torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from aheadgrad.cache.code import whose
from aheadgrad.cache.value_texts import Teller, Unprovable
from aheadgrad.torchlayer.written_backward import NOTE

_META = ("stack_trace", "recompute", "ac_graph_id", "custom", "autograd_backward", NOTE)  # what matters


def told_of_graph(module: nn.Module, teller: Teller) -> Iterator[tuple[str, str]]:
    """Node by node; raises `Unprovable` for what is not told by its name."""
    if not isinstance(module, fx.GraphModule):
        raise Unprovable("a module that is no graph")
    for node in module.graph.nodes:
        args = [_argument(a, teller) for a in (node.args, node.kwargs)]
        meta = teller.tell({key: node.meta[key] for key in _META if key in node.meta})
        yield node.name, f"{node.op} {_target(module, node, teller)} {args} {meta}"


def _argument(value: Any, teller: Teller) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join([_argument(v, teller) for v in value])})"
    if isinstance(value, dict):
        return f"dict({', '.join([f'{k!r}: {_argument(v, teller)}' for k, v in value.items()])})"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), teller)}"
    return teller.tell(value)


def _target(module: fx.GraphModule, node: fx.Node, teller: Teller) -> str:
    target: Any = node.target
    if node.op == "call_function":
        if isinstance(target, FunctionType) and not whose(target.__code__.co_filename):
            raise Unprovable(f"the function {target.__qualname__}, which the graph calls,")
        return teller.tell(target)
    if node.op not in ("get_attr", "call_module"):
        return str(target)
    found: Any = module
    for name in str(target).split("."):
        found = getattr(found, name)
    if isinstance(found, Tensor) and id(found) in teller.known:
        return teller.known[id(found)]
    return f"{list(told_of_graph(found, teller))}" if isinstance(found, nn.Module) else teller.tell(found)

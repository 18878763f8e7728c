"""Functions that are given to control-flow operators, as graphs: what they close over becomes an input.

    closed = Closed(mode, lift)
    graph, spec = closed.graph(f, examples)
    graph = closed.complete(graph)               # graph(*examples, *closed.tensors)
    back = vjp(graph, wanted, given)             # back(*examples, *tangents) -> gradients of those wanted

Graphs are made of functional ops on fake tensors. So are those of their derivatives, of any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from aheadgrad.errors import FallbackError
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import (
    HigherOrderOperator,
    OpOverload,
    TorchFunctionMode,
    is_mutable,
    is_random,
)
from aheadgrad.torchlayer.fake import FakeTensor, FakeTensorMode

__all__ = ["Closed", "Function", "GraphModule", "outputs_of", "traced", "vjp"]

Function = Callable[..., list[Tensor]]


class Closed:
    """The tensors that some functions close over, in the order in which they were met.

    `lift` gives the traced tensor for one from outside.
    """

    def __init__(self, mode: FakeTensorMode, lift: Callable[[Tensor], Tensor]) -> None:
        self.mode = mode
        self.lift = lift
        self.tensors: list[Tensor] = []
        self._fakes: dict[int, Tensor] = {}  # by id

    def graph(self, function: Any, examples: Sequence[Tensor]) -> tuple[GraphModule, Any]:
        """One run of the function; and the structure of what it returned. To be completed (`complete`)."""
        specs: list[Any] = []

        def flat(*args: Tensor) -> list[Any]:
            with _Swap(self._swap):
                out, spec = pytree.tree_flatten(function(*args))
            specs.append(spec)
            if not all(isinstance(t, FakeTensor) for t in out):
                out = pytree.tree_map(lambda t: self._swap(t) if isinstance(t, Tensor) else t, out)
            return list(out)

        with functional.without_modes(), self.mode, torch.enable_grad():
            return make_fx(flat)(*examples), specs[0]

    def complete(self, graph: GraphModule) -> GraphModule:
        """With an input for each of the tensors."""
        last = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
        held = {n: getattr(graph, n.target) for n in graph.graph.nodes if n.op == "get_attr"}
        for k, t in enumerate(self.tensors):
            fake = self._fakes[id(t)]
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"closed_{k}")
            last.meta["val"] = fake
            for node in [n for n, value in held.items() if value is fake]:
                node.replace_all_uses_with(last)
                graph.graph.erase_node(node)
        graph.recompile()
        return _functional(graph, [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"])

    @property
    def fakes(self) -> list[Tensor]:
        return [self._fakes[id(t)] for t in self.tensors]

    def _swap(self, t: Tensor) -> Tensor:
        if isinstance(t, FakeTensor):
            return t
        seen = self.lift(t)
        if id(seen) not in self._fakes:
            functional.sync(seen)
            self.tensors.append(seen)
            with functional.outside():
                self._fakes[id(seen)] = functional.unwrap(seen).detach()
        return self._fakes[id(seen)]


class _Swap(TorchFunctionMode):
    """Over the run of a function: tensors from outside are swapped for others."""

    def __init__(self, swap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.swap = swap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def one(value: Any) -> Any:
            return self.swap(value) if isinstance(value, Tensor) else value

        args, kwargs = pytree.tree_map(one, (args, kwargs or {}))
        return func(*args, **kwargs)


def _functional(graph: GraphModule, examples: Sequence[Any]) -> GraphModule:
    """The same without ops in place, which may change nothing but what the graph itself made."""
    if not any(map(is_mutable, _ops(graph))):
        return graph
    with functional.outside(), examples[0].fake_mode:
        graph = make_fx(torch.func.functionalize(graph))(*examples)
    if any(map(is_mutable, _ops(graph))):
        raise FallbackError("a function given to a control-flow operator changes a tensor from outside")
    return graph


def _ops(graph: GraphModule) -> list[OpOverload]:
    return [n.target for n in graph.graph.nodes if isinstance(n.target, OpOverload)]


def outputs_of(graph: GraphModule) -> list[Any]:
    """What a graph returns, as fake tensors."""
    (returned,) = next(n for n in graph.graph.nodes if n.op == "output").args
    return [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in returned]


def vjp(function: Function, wanted: Sequence[bool], given: Sequence[bool], inside: Any) -> Function:
    """From inputs, and tangents of the outputs that are `given`, to the gradients of the inputs `wanted`.

    With a history: the derivative of this is another function of the kind. (The graph of it has lost that:
    autograd detaches what it saves.) `inside` calls control-flow operators inside of it.
    """
    if isinstance(function, GraphModule):
        if any(map(is_random, _ops(function))):
            raise FallbackError("a function given to a control-flow operator draws random numbers")
        if any(isinstance(n.target, HigherOrderOperator) for n in function.graph.nodes):
            function = _Calls(function, inside).run

    def backward(*args: Tensor) -> list[Tensor]:
        leaves = [p.requires_grad_() for p in compress(args, wanted)]
        made = compress(function(*args[: len(wanted)]), given)
        ends = [(t, g) for t, g in zip(made, args[len(wanted) :], strict=True) if t.requires_grad]
        grads: Any = [None] * len(leaves)
        if ends:
            outs, tangents = zip(*ends, strict=True)
            grads = torch.autograd.grad(outs, leaves, tangents, allow_unused=True, create_graph=True)
        return [
            torch.zeros_like(p) if g is None else g.contiguous() for p, g in zip(leaves, grads, strict=True)
        ]

    return backward


class _Calls(torch.fx.Interpreter):
    def __init__(self, graph: GraphModule, inside: Any) -> None:
        super().__init__(graph)
        self.inside = inside

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator):
            mode = next(t.fake_mode for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FakeTensor))
            return self.inside(mode, target, args, kwargs)
        return super().call_function(target, args, kwargs)


def traced(function: Callable[..., Any], examples: Sequence[Any]) -> GraphModule:
    """A function as a graph."""
    with functional.outside(), examples[0].fake_mode, torch.enable_grad():
        made = make_fx(function)(*(t.detach() for t in examples))
    made.graph.eliminate_dead_code()
    made.recompile()
    return made

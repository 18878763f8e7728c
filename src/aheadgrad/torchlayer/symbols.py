"""Symbolic sizes: numbers in op arguments that must become nodes of the graph.

No op announces a symbolic size; it arrives inside arguments as a SymInt with an expression. The
expression is rebuilt from symbols that the program's inputs (or values made so far) provide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

_SIZE = torch.ops.aten.sym_size.int


def is_symbolic(value: Any) -> bool:
    return isinstance(value, SymInt | SymFloat | SymBool)


def free_symbols(value: Any) -> set[Any]:
    """The symbols of a SymInt, a tensor's sizes, or a nest of such."""
    if is_symbolic(value):
        return set(value.node.expr.free_symbols)
    if isinstance(value, Tensor):
        found: set[Any] = set()
        for part in (*value.size(), *value.stride(), value.storage_offset()):
            if is_symbolic(part):
                found |= set(part.node.expr.free_symbols)
        return found
    if isinstance(value, list | tuple):
        return set().union(*(free_symbols(v) for v in value)) if value else set()
    if isinstance(value, dict):
        return free_symbols(list(value.values()))
    return set()


def expression(value: Any) -> Any:
    return value.node.expr


def size_hint(value: Any) -> int:
    return int(value.node.hint) if isinstance(value, SymInt) else int(value)


class SymbolNodes:
    """Nodes for symbols and expressions in one graph, made when first needed."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.known: dict[Any, fx.Node] = {}
        self.sources: dict[Any, tuple[fx.Node, int]] = {}

    def learn_number(self, value: Any, node: fx.Node) -> None:
        if is_symbolic(value):
            self.known.setdefault(value.node.expr, node)

    def learn_tensor(self, value: Tensor, node: fx.Node) -> None:
        for dim, size in enumerate(value.size()):
            if isinstance(size, SymInt):
                self.sources.setdefault(size.node.expr, (node, dim))

    def node(self, value: Any) -> Any:
        expr = value.node.expr
        if expr.is_number:
            return int(expr) if isinstance(value, SymInt) else float(expr)
        made = self._of_expression(expr)
        made.meta.setdefault("val", value)
        return made

    def _of_expression(self, expr: Any) -> fx.Node:
        if expr in self.known:
            return self.known[expr]
        if expr in self.sources:
            tensor, dim = self.sources[expr]
            node = self.graph.call_function(_SIZE, (tensor, dim))
            self.known[expr] = node
            return node
        return self._arithmetic(expr)

    def _arithmetic(self, expr: Any) -> fx.Node:
        from torch.fx.proxy import GraphAppendingTracer, Proxy
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        tracer = GraphAppendingTracer(self.graph)
        missing = [s for s in expr.free_symbols if s not in self.known and s not in self.sources]
        if missing:
            raise AssertionError(f"no input of this program provides the size {missing[0]}")
        env = {s: Proxy(self._of_expression(s), tracer) for s in expr.free_symbols}
        node: fx.Node = sympy_interp(PythonReferenceAnalysis, env, expr).node
        self.known[expr] = node
        return node

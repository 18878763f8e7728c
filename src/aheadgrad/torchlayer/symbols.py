"""Symbolic sizes: numbers in op arguments that must become nodes of the graph.

No op announces a symbolic size; it arrives inside arguments as a SymInt with an expression. The
expression is rebuilt from symbols that the program's inputs (or values made so far) provide:

    x.view(x.shape[0] * 3)      sym_size_int = sym_size(x, 0);  mul = sym_size_int * 3;  view(x, [mul])
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.fx.proxy import GraphAppendingTracer, Proxy

aten = torch.ops.aten
_SIZE, _STRIDE, _OFFSET = aten.sym_size.int, aten.sym_stride.int, aten.sym_storage_offset.default


@dataclass(frozen=True, slots=True)
class Number:
    """A symbolic number as a value, without the environment that torch's own kind lives in.

    `hint` is what the number was when it was recorded, None if values decide it.
    """

    expr: Any
    kind: type = int
    hint: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.expr)

    def __repr__(self) -> str:
        return str(self.expr)


class UnknownSize(AssertionError):
    """A program computes with a number that none of its inputs provides."""


def is_symbolic(value: Any) -> bool:
    return isinstance(value, SymInt | SymFloat | SymBool | Number)


def expression(value: Any) -> Any:
    """The expression behind a symbolic number, with all that is known by now put in."""
    return value.expr if type(value) is Number else value.node.expr


def hints_of(env: Any) -> dict[Any, Any]:
    """By symbol, the number that it was when it was made. (Torch has renamed the table.)"""
    table: dict[Any, Any] = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return table


def frozen_number(value: Any) -> Any:
    """One of torch's symbolic numbers as a value: a plain number, if by now only one is possible."""
    if type(value) is Number or is_ragged(value):
        return value
    constant = constant_of(value)
    return as_number(value) if constant is None else constant


def as_number(value: Any) -> Number:
    """The same, for a number that is given at each call, whatever it may be."""
    kind = int if isinstance(value, SymInt) else float if isinstance(value, SymFloat) else bool
    return Number(expression(value), kind, value.node.hint)


class Shape(tuple[Any, ...]):
    """A `torch.Size` of symbolic numbers as values, which torch's own class does not take."""

    __slots__ = ()


def frozen_numbers(values: Any) -> tuple[Any, ...]:
    return tuple(n if type(n) is int else frozen_number(n) if is_symbolic(n) else n for n in values)


def written_numbers(env: Any, texts: Iterable[str]) -> tuple[Any, ...]:
    """Numbers that torch wrote as Python over the symbols of an environment."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    hints = hints_of(env)
    known = ((s, int(hints[s]) if s in hints else None) for s in env.var_to_range if s.is_integer)
    sizes = {str(s): env.create_symintnode(s, hint=hint) for s, hint in known}
    return frozen_numbers(eval(text, SYMPY_INTERP, sizes) for text in texts)


def with_numbers(value: Any, sizes: Mapping[Any, Any]) -> Any:
    """A symbolic number where symbols stand for these numbers."""
    expr = value.expr.xreplace({s: sympy.sympify(n) for s, n in sizes.items()})
    return Number(expr, value.kind, value.hint) if expr.free_symbols else value.kind(expr)


def is_ragged(number: Any) -> bool:
    """A size that stands for the lengths of a jagged dimension."""
    return isinstance(number, SymInt) and bool(number.node.is_nested_int())


def free_symbols(value: Any) -> set[Any]:
    """The symbols of a symbolic number, a tensor's sizes, or a nest of such."""
    if is_symbolic(value):
        return set(expression(value).free_symbols)
    if isinstance(value, Tensor):
        parts = (*value.size(), *value.stride(), value.storage_offset())
        return set().union(*(free_symbols(p) for p in parts if is_symbolic(p)))
    if isinstance(value, list | tuple):
        return set().union(*(free_symbols(v) for v in value)) if value else set()
    if isinstance(value, dict):
        return free_symbols(list(value.values()))
    return set()


def free_dimensions(t: Tensor) -> tuple[int, ...]:
    """The dimensions of which the size may be another."""
    sizes: list[Any] = list(t.size())
    symbolic = [(d, n) for d, n in enumerate(sizes) if is_symbolic(n) and hasattr(n.node, "expr")]
    return tuple(d for d, n in symbolic if constant_of(n) is None)  # ragged sizes have no expression


def symbols_of_numbers(value: Any) -> set[Any]:
    """As `free_symbols`, of numbers alone."""
    if isinstance(value, list | tuple):
        return set().union(*map(symbols_of_numbers, value)) if value else set()
    if isinstance(value, dict):
        return symbols_of_numbers(list(value.values()))
    return set(expression(value).free_symbols) if is_symbolic(value) else set()


def size_hint(value: Any) -> int:
    """The number that a symbolic size is, or else had when it was recorded; `typical` if it had none."""
    if not isinstance(value, SymInt | Number):
        return int(value)
    constant = constant_of(value)
    if constant is not None:
        return int(constant)
    hint = _hint(value)
    return int(typical(value) if hint is None else hint)


def _hint(value: Any) -> Any:
    return value.hint if type(value) is Number else value.node.hint


def typical(value: Any) -> Any:
    """A number in place of a size that values decide (`x[mask]`), for questions of our own to memory.

    It is what the size would be if each of its symbols stood for some large number, another for each.
    Any other number is returned as it is.
    """
    if not isinstance(value, SymInt | Number) or _hint(value) is not None or constant_of(value) is not None:
        return value
    known: dict[Any, Any] = {}
    if isinstance(value, SymInt):
        known = hints_of(value.node.shape_env)
    expr = expression(value)
    return int(expr.xreplace({s: known.get(s, _large(s)) for s in expr.free_symbols}))


def typical_sizes(t: Tensor) -> tuple[Any, ...]:
    return tuple(map(typical, t.size()))


def typical_strides(t: Tensor) -> tuple[Any, ...]:
    return tuple(map(typical, t.stride()))


def _large(symbol: Any) -> Any:
    number = int("".join(filter(str.isdigit, symbol.name)) or 0)
    return sympy.Integer(1009 + 2 * number)


def number_hint(value: Any) -> int | float:
    """The same for a number of either kind."""
    if not isinstance(value, SymFloat) and getattr(value, "kind", int) is not float:
        return size_hint(value)
    constant = constant_of(value)
    return float(_hint(value) if constant is None else constant)


def constant_of(value: Any) -> Any:
    """The plain number, if by now only one is possible; None otherwise."""
    expr = expression(value)
    kind = getattr(value, "kind", None)
    if isinstance(value, SymBool) or kind is bool:
        return bool(expr) if expr.is_Boolean and not expr.free_symbols else None
    if not expr.is_number:
        return None
    return int(expr) if isinstance(value, SymInt) or kind is int else float(expr)


MODULES: dict[str, Any] = {"math": math, "torch": torch}  # what `python_text` may refer to


def python_text(expr: Any) -> str:
    """The expression as Python source over its symbols' names (and `MODULES`)."""
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expr))


def symbolic_numbers(value: Tensor) -> list[tuple[Any, tuple[Any, ...], Any]]:
    """Where a tensor shows numbers: `(op, further arguments, number)`, sizes first."""
    strided = value.layout is torch.strided
    return shown_by(
        value.size(), value.stride() if strided else None, value.storage_offset() if strided else 0
    )


def shown_by(size: Any, stride: Any, offset: Any) -> list[tuple[Any, tuple[Any, ...], Any]]:
    """As `symbolic_numbers`, by what a tensor looks like; no strides if it is not strided."""
    found: list[tuple[Any, tuple[Any, ...], Any]] = []
    found += [(_SIZE, (d,), n) for d, n in enumerate(size)]
    if stride is not None:
        found += [(_STRIDE, (d,), n) for d, n in enumerate(stride)]
        found.append((_OFFSET, (), offset))
    return [p for p in found if is_symbolic(p[2])]


@functools.cache
def _arithmetic() -> Any:
    """Expressions as Python would compute them, also on proxies."""
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Python(PythonReferenceAnalysis):
        @staticmethod
        def int_truediv(a: Any, b: Any) -> Any:
            return a / b

        trunc_to_int = staticmethod(functools.partial(_rounded, math.trunc))
        floor_to_int = staticmethod(functools.partial(_rounded, math.floor))
        ceil_to_int = staticmethod(functools.partial(_rounded, math.ceil))
        round_to_int = staticmethod(functools.partial(_rounded, round))

    return Python


def _rounded(function: Callable[[Any], Any], a: Any, dtype: Any) -> Any:
    """`math.floor` and its kin as nodes; Python would insist on a number for their results."""
    if not isinstance(a, Proxy):
        return function(a)
    return a.tracer.create_proxy("call_function", function, (a,), {})


@contextmanager
def _quiet() -> Iterator[None]:
    """The interpreter of expressions logs a warning before it raises; the raised error is enough."""
    log = logging.getLogger("torch.utils._sympy.interp")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _Arithmetic(GraphAppendingTracer):
    """Appends nodes under names of our choice, each with its value."""

    def __init__(self, graph: fx.Graph, fresh: Callable[[str], str]) -> None:
        super().__init__(graph)
        self.fresh = fresh

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        name = self.fresh(getattr(target, "__name__", "number"))
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
        return node


class SymbolNodes:
    """Nodes for symbolic numbers in one graph: those that are `known` by their expression, and what is
    computed from them. `fresh` gives names."""

    def __init__(self, graph: fx.Graph, fresh: Callable[[str], str]) -> None:
        self.graph = graph
        self.fresh = fresh
        self.known: dict[Any, fx.Node] = {}

    def node(self, value: Number) -> fx.Node:
        from torch.utils._sympy.interp import sympy_interp

        expr = value.expr
        if expr not in self.known:
            missing = [s for s in expr.free_symbols if s not in self.known]
            if missing:
                raise UnknownSize(f"no input of this program provides the size {missing[0]}")
            tracer = _Arithmetic(self.graph, self.fresh)
            env = {s: Proxy(self.known[s], tracer) for s in expr.free_symbols}
            with _quiet():
                self.known[expr] = sympy_interp(_arithmetic(), env, expr).node
        return self.known[expr]

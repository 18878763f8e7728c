"""Symbolic expressions as trees of names and numbers, and back: no text is parsed.

    parts(s0 * 3)                ->  "Mul", (3, s0)
    symbol_parts(s0)             ->  "s0", ("integer", "positive")
    expression("Mul", (3, s0))   ->  s0 * 3

What comes back is what was written: an expression that sympy would write otherwise (and might compute for
ever to do so) is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

import sympy

_LARGEST = 1 << 128
_POWERS = 64
_SUMMANDS, _OPERANDS = 4096, 64
_ASSUMPTIONS = ("integer", "positive", "nonnegative", "negative", "nonpositive", "real", "zero", "finite")


@functools.cache
def _heads() -> dict[str, Any]:
    """What expressions are made of: sympy's own, and those that torch adds for Python's arithmetic."""
    from torch.utils._sympy import functions as own

    names = "Add Mul Pow Eq Ne Lt Le Gt Ge And Or Not Mod Abs Min Max Piecewise floor ceiling exp log"
    found = {f"sympy.{name}": getattr(sympy, name) for name in names.split()}
    found["sympy.case"] = sympy.functions.elementary.piecewise.ExprCondPair
    names = """FloorDiv CleanDiv ModularIndexing Where PythonMod Mod CeilToInt FloorToInt Max Min PowByNatural
        FloatPow FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity
        IsNonOverlappingAndDenseIndicator OpaqueUnaryFn_sqrt OpaqueUnaryFn_cos OpaqueUnaryFn_cosh
        OpaqueUnaryFn_sin OpaqueUnaryFn_sinh OpaqueUnaryFn_tan OpaqueUnaryFn_tanh OpaqueUnaryFn_asin
        OpaqueUnaryFn_acos OpaqueUnaryFn_atan OpaqueUnaryFn_exp OpaqueUnaryFn_log OpaqueUnaryFn_asinh
        OpaqueUnaryFn_log2 BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor"""
    return found | {name: getattr(own, name) for name in names.split() if hasattr(own, name)}


@functools.cache
def _names() -> dict[Any, str]:
    return {head: name for name, head in _heads().items()}


def is_expression(value: Any) -> bool:
    return isinstance(value, sympy.Basic)


def is_symbol(value: Any) -> bool:
    return type(value) is sympy.Symbol


def symbol_parts(symbol: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A symbol's name, what it is and what it is not."""
    told = {k: v for k, v in symbol._assumptions_orig.items() if k != "commutative"}
    if not set(told) <= set(_ASSUMPTIONS):
        raise ValueError(f"the symbol {symbol} is assumed to be {', '.join(sorted(told))}")
    return (
        symbol.name,
        tuple(sorted(k for k, v in told.items() if v)),
        tuple(sorted(k for k, v in told.items() if v is False)),
    )


def symbol(name: str, is_: Sequence[str], is_not: Sequence[str]) -> Any:
    """The symbol. Its name may stand in generated code."""
    if not name.isidentifier() or iskeyword(name) or not {*is_, *is_not} <= set(_ASSUMPTIONS):
        raise ValueError(f"{name!r} is no name of a size")
    return sympy.Symbol(name, **dict.fromkeys(is_, True), **dict.fromkeys(is_not, False))


def parts(expr: Any) -> tuple[str, tuple[Any, ...]]:
    """The head of an expression that is no symbol, and what it applies to."""
    if isinstance(expr, sympy.Integer):
        return "integer", (int(expr),)
    if isinstance(expr, sympy.Rational):
        return "rational", (int(expr.p), int(expr.q))
    if isinstance(expr, sympy.Float) and float(expr) == expr:
        return "float", (float(expr),)
    if expr in (sympy.true, sympy.false):
        return "truth", (expr == sympy.true,)
    name = _names().get(type(expr))
    if name is None:
        raise ValueError(f"{expr} has a {type(expr).__name__} in it")
    return name, expr.args


def expression(head: str, args: Sequence[Any]) -> Any:
    """The expression; ValueError for one that `parts` would not have given."""
    match head, list(args):
        case "integer", [int(n)] if type(n) is int and abs(n) < _LARGEST:
            return sympy.Integer(n)
        case "rational", [int(p), int(q)] if q > 1 and max(abs(p), q) < _LARGEST:
            made = sympy.Rational(p, q)
            if (made.p, made.q) == (p, q):
                return made
        case "float", [float(x)]:
            return sympy.Float(x)
        case "truth", [bool(x)]:
            return sympy.true if x else sympy.false
        case _ if head in _heads() and args and all(map(is_expression, args)):
            return _applied(head, tuple(args))
    raise ValueError(f"{head} of {len(args)} things is no expression of sizes")


def _applied(head: str, args: tuple[Any, ...]) -> Any:
    if "Pow" in head and not _is_small(args):
        raise ValueError("a power in a size is too large")
    if len(args) > (_SUMMANDS if head in ("sympy.Add", "sympy.Mul") else _OPERANDS):
        raise ValueError(f"{head} of {len(args)} things is too large")
    if sum(a.is_Number for a in args) > 1 and head not in ("sympy.case", "sympy.Piecewise"):
        raise ValueError(f"{head} of numbers is a number")
    try:
        made = _heads()[head](*args)
    except Exception as error:
        raise ValueError(f"{head} does not apply to {args}: {error}") from error
    if type(made) is not _heads()[head] or made.args != args:
        raise ValueError(f"{head} of {args} is {made}, and would be written so")
    return made


def _is_small(args: tuple[Any, ...]) -> bool:
    """No power of a number, and none above what sizes need."""
    return len(args) == 2 and not (args[1].is_Integer and abs(args[1]) > _POWERS)

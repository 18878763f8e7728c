"""Strides of results with symbolic sizes, where a dimension has one element.

Fake tensors follow formulas that may give such a dimension another stride than the kernel does. The kernel
cannot be asked with symbols, but with numbers in their place, for several choices of those:

    (s, 1, 3) of strides (3, 1, 1), times a number       s = 22: (3, 1, 1)    s = 5: (3, 1, 1)   ...

A new result has no gaps, so its strides follow from the order of its dimensions in memory. The order that
explains what the kernel said for all choices gives the strides in symbols. Choices are small and large, in
both orders, so that one that depends on which of two sizes is the larger does not pass for one that does
not; only those are made that agree with what was assumed of the sizes so far.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aheadgrad.torchlayer.kernels import NotAsked, ask_kernel
from aheadgrad.torchlayer.symbols import expression, free_symbols, hints_of, is_symbolic, size_hint

Choice = dict[Any, sympy.Integer]
_MOST_DIMENSIONS = 6
_MOST_ELEMENTS = 1 << 18
_SMALL, _LARGE = (5, 7, 11, 13, 17, 19), (29, 23, 31, 37, 41, 43)


class NotKnown(Exception):
    """No order of dimensions in memory explains what the kernel says."""


def strides_by_kernel(
    env: ShapeEnv, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor]
) -> list[tuple[Any, ...]]:
    """For each result its strides, in symbols."""
    asked: list[tuple[Choice, list[Tensor]]] = []
    for choice in _choices(env, (args, kwargs, outs)):
        try:
            real = ask_kernel(func, args, kwargs, functools.partial(_number, choice), _MOST_ELEMENTS)
        except (NotAsked, RuntimeError, ValueError, IndexError):  # too large, or the op refuses these sizes
            continue
        asked.append((choice, _tensors(real)))
    if len(asked) < 2:
        raise NotAsked
    return [_explained(t, [(choice, real[k]) for choice, real in asked]) for k, t in enumerate(outs)]


def _explained(t: Tensor, asked: list[tuple[Choice, Tensor]]) -> tuple[Any, ...]:
    """The strides of the one order of dimensions that fits all that the kernel said."""
    size = tuple(t.size())
    numbers = [tuple(_number(choice, n) for n in size) for choice, _ in asked]
    if any(tuple(real.size()) != n for n, (_, real) in zip(numbers, asked, strict=True)):
        raise NotKnown
    if all(tuple(_number(choice, n) for n in t.stride()) == real.stride() for choice, real in asked):
        return tuple(t.stride())
    if t.dim() > _MOST_DIMENSIONS:
        raise NotKnown
    for order in itertools.permutations(range(t.dim())):
        fits = (dense_strides(n, order) == real.stride() for n, (_, real) in zip(numbers, asked, strict=True))
        if all(fits):
            return dense_strides(size, order)
    raise NotKnown


def dense_strides(size: tuple[Any, ...], order: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides without gaps for dimensions in this order in memory, the outermost first."""
    strides: list[Any] = [1] * len(size)
    step: Any = 1
    for d in reversed(order):
        strides[d] = step
        step = step * size[d]
    return tuple(strides)


def order_of(stride: Any) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost, going by recorded sizes."""
    strides = [size_hint(s) for s in stride]
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def in_same_order(made: Any, usual: Any) -> bool:
    """Are these no tensors, or tensors with the same strides, dimensions of one element aside?"""
    if not isinstance(made, Tensor) or made.dim() < 2 or made.numel() == 0:
        return True
    return all(n == 1 or a == b for n, a, b in zip(made.size(), made.stride(), usual.stride(), strict=True))


def in_order_of(made: Any, usual: Any) -> Any:
    """The same values, with dimensions in the order in memory that they have in another tensor."""
    if in_same_order(made, usual):
        return made
    order = order_of(usual.stride())
    if dense_strides(tuple(usual.size()), order) != tuple(usual.stride()):
        return made
    laid_out = made.permute(order).clone(memory_format=torch.contiguous_format)
    return laid_out.permute([order.index(d) for d in range(made.dim())])


def same_numbers(one: Any, other: Any) -> bool:
    """The same expressions; unlike `==` this assumes nothing."""
    return all(_expression(a) == _expression(b) for a, b in zip(one, other, strict=True))


def _expression(value: Any) -> Any:
    return expression(value) if is_symbolic(value) else value


def _number(choice: Choice, value: Any) -> int:
    if not is_symbolic(value):
        return int(value)
    number = expression(value).xreplace(choice)
    if not number.is_Integer:
        raise NotAsked
    return int(number)


def _choices(env: ShapeEnv, values: Any) -> Iterator[Choice]:
    """Numbers for all symbols among the values, in a few different ways."""
    symbols = sorted(_symbols(values), key=str)
    if len(symbols) > len(_SMALL):
        raise NotAsked
    known = [_hint(env, s) for s in symbols]
    twos = [2] * len(symbols)
    ways: list[list[int]] = [list(_SMALL), list(_LARGE[::-1]), list(_SMALL[::-1]), twos]
    if all(n is not None for n in known):
        ways = [known, [n * (k + 2) for k, n in enumerate(known)], *ways]
    for way in ways:
        choice = dict(zip(symbols, map(sympy.Integer, way), strict=False))
        if _agrees(env, choice):
            yield choice


def _symbols(values: Any) -> set[Any]:
    if isinstance(values, list | tuple):
        return set().union(*map(_symbols, values))
    if isinstance(values, dict):
        return _symbols(list(values.values()))
    return {symbol for symbol in free_symbols(values) if symbol.is_integer}


def _hint(env: ShapeEnv, symbol: Any) -> Any:
    number = hints_of(env).get(symbol)
    return None if number is None else int(number)


def _agrees(env: ShapeEnv, choice: Choice) -> bool:
    """Is nothing assumed that does not hold for these numbers?"""
    for symbol, number in choice.items():
        bounds = env.var_to_range.get(symbol)
        if bounds is not None and number not in bounds:
            return False
    return not any(g.expr.xreplace(choice) == False for g in env.guards)  # noqa: E712 (sympy's)


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, list | tuple) else (out,)) if isinstance(t, Tensor)]

"""What is assumed of symbolic sizes: counted, tried out, or replaced by numbers for a while."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aheadgrad.torchlayer.fake import FakeTensorMode
from aheadgrad.torchlayer.symbols import expression, is_symbolic
from aheadgrad.torchlayer.unbacked import set_aside

Sizes = dict[Any, int]
"""Symbols, and the numbers that they stand for."""


def assumptions(mode: FakeTensorMode) -> int:
    """How many things were assumed of symbolic sizes so far."""
    return 0 if mode.shape_env is None else len(mode.shape_env.guards)


@contextmanager
def on_trial(mode: FakeTensorMode) -> Iterator[Callable[[], bool]]:
    """Yields a question: is something assumed that was not before? If so it is forgotten at the end."""
    env = mode.shape_env
    assert env is not None
    count, before = assumptions(mode), _state(env)
    try:
        yield lambda: assumptions(mode) != count
    finally:
        if assumptions(mode) != count:
            _restore(env, before)


@contextmanager
def as_numbers(mode: FakeTensorMode, sizes: Sizes) -> Iterator[None]:
    """Symbols stand for these numbers; that, and what is assumed inside, is forgotten at the end."""
    env = mode.shape_env
    assert env is not None
    before = _state(env)
    set_aside(env, sizes)
    env.replacements.update({symbol: sympy.Integer(n) for symbol, n in sizes.items()})
    _changed(env)
    evaluate = env.evaluate_expr

    def without_hint(expr: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return evaluate(expr, None, *args, **kwargs)  # hints are of the sizes seen first

    with patch.object(env, "evaluate_expr", without_hint):
        try:
            yield
        finally:
            set_aside(env, {})
            _restore(env, before)


def _state(env: ShapeEnv) -> dict[str, Any]:
    kinds = (dict, list, set, int)
    return {k: copy.copy(v) for k, v in vars(env).items() if isinstance(v, kinds) and "version" not in k}


def _restore(env: ShapeEnv, before: dict[str, Any]) -> None:
    vars(env).update(before)
    _changed(env)


def sizes_from(pairs: Iterable[tuple[Any, Any]]) -> Sizes:
    """What symbols stand for, by traced values and the real ones in their place."""
    found: Sizes = {}
    for traced, real in pairs:
        numbers: Iterable[tuple[Any, Any]] = [(traced, real)]
        if isinstance(traced, Tensor):
            both = [(*t.size(), *_strides(t)) for t in (traced, real)]
            numbers = zip(*both, strict=True)
        for number, value in numbers:
            if is_symbolic(number) and expression(number).is_Symbol:
                found[expression(number)] = int(value)
    return found


def _strides(t: Tensor) -> tuple[Any, ...]:
    return (*t.stride(), t.storage_offset()) if t.layout is torch.strided else ()


def _changed(env: ShapeEnv) -> None:
    """Tells the environment's caches, of which some know nothing of versions."""
    for name in ("_version_counter", "_replacements_version_counter"):
        if hasattr(env, name):
            setattr(env, name, getattr(env, name) + 1)
    for value in vars(type(env)).values():
        clear = getattr(value, "cache_clear", None)
        if clear is not None:
            clear()

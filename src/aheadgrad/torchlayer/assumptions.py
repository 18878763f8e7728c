"""What is assumed of symbolic sizes: counted, tried out, or replaced by numbers for a while."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aheadgrad.torchlayer.fake import FakeTensorMode
from aheadgrad.torchlayer.lock import must_be_held
from aheadgrad.torchlayer.symbols import hints_of
from aheadgrad.torchlayer.unbacked import set_aside

Sizes = dict[Any, int | float]
"""Symbols, and the numbers that they stand for."""


def assumptions(mode: FakeTensorMode) -> int:
    """How many things were assumed of symbolic sizes so far."""
    return 0 if mode.shape_env is None else len(mode.shape_env.guards)


def conditions(mode: FakeTensorMode) -> list[Any]:
    """What is assumed of symbolic sizes, as expressions; not what holds for sizes from 2 on."""
    env = mode.shape_env
    if env is None:
        return []
    found = [env.simplify(guard.expr) for guard in env.guards]
    return [expr for expr in found if expr != sympy.true]


class Assumed:
    """All that is assumed of symbolic sizes now, to compare with and to go back to."""

    def __init__(self, mode: FakeTensorMode) -> None:
        assert mode.shape_env is not None
        self.mode, self.env = mode, mode.shape_env
        self.count, self.state = assumptions(mode), _state(self.env)

    @property
    def changed(self) -> bool:
        return assumptions(self.mode) != self.count

    def restore(self) -> None:
        _restore(self.env, self.state)


@contextmanager
def on_trial(mode: FakeTensorMode) -> Iterator[Callable[[], bool]]:
    """Yields a question: is something assumed that was not before? If so it is forgotten at the end."""
    before = Assumed(mode)
    try:
        yield lambda: before.changed
    finally:
        if before.changed:
            before.restore()


@contextmanager
def as_numbers(mode: FakeTensorMode, sizes: Sizes) -> Iterator[None]:
    """Symbols stand for these numbers; that, and what is assumed inside, is forgotten at the end."""
    must_be_held()
    env = mode.shape_env
    assert env is not None
    before = _state(env)
    set_aside(env, sizes)
    numbers = {s: sympy.Float(n) if isinstance(n, float) else sympy.Integer(n) for s, n in sizes.items()}
    numbers |= {  # and those that are known to be the same, or follow from them
        s: number for s, known in env.replacements.items() if (number := known.subs(numbers)).is_number
    }
    env.replacements.update(numbers)
    hints_of(env).update(numbers)
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


@contextmanager
def of_its_own(mode: FakeTensorMode | None, sizes: Mapping[Any, int]) -> Iterator[list[Any]]:
    """What is assumed of symbolic sizes inside, as expressions that hold for these sizes (and, where none are
    given, for those seen first). It is forgotten at the end: whoever assumed it has to check it."""
    must_be_held()
    env = None if mode is None else mode.shape_env
    found: list[Any] = []
    if env is None or not env.var_to_range:
        yield found
        return
    before, count = _state(env), len(env.guards)
    hints_of(env).update({s: sympy.sympify(n) for s, n in sizes.items()})
    env.frozen = False  # Dynamo has made its guards: others would be dropped
    _changed(env)
    try:
        yield found
        found += [guard.expr for guard in env.guards[count:]]
    finally:
        _restore(env, before)


def _state(env: ShapeEnv) -> dict[str, Any]:
    kinds = (dict, list, set, int)
    return {k: copy.copy(v) for k, v in vars(env).items() if isinstance(v, kinds) and "version" not in k}


def _restore(env: ShapeEnv, before: dict[str, Any]) -> None:
    """As it was, but for symbols that are new: sizes of tensors that may live on."""
    new = env.var_to_range.keys() - before["var_to_range"].keys()
    for name, value in before.items():
        if isinstance(value, dict):
            now = vars(env)[name]
            value.update({k: now[k] for k in new & now.keys()})
        if "counter" not in name:
            vars(env)[name] = value
    env.pending_fresh_unbacked_symbols = [s for s in env.pending_fresh_unbacked_symbols if s not in new]
    _changed(env)


def _changed(env: ShapeEnv) -> None:
    """Tells the environment's caches, of which some know nothing of versions."""
    for name in ("_version_counter", "_replacements_version_counter"):
        if hasattr(env, name):
            setattr(env, name, getattr(env, name) + 1)
    for value in vars(type(env)).values():
        clear = getattr(value, "cache_clear", None)
        if clear is not None:
            clear()

"""Does a value have the type that a field is annotated with?

accepts(tuple[int, ...])((1, 2))      # True
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

Test = Callable[[Any], bool]
_EXACT = (int, str, bool, complex, bytes)  # True is no number


def accepts(hint: Any) -> Test | None:
    """A test for values of a type; None if it accepts anything."""
    if hint is Any or hint is object:
        return None
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _any(args)
    if origin is Literal:
        return lambda v: any(type(v) is type(a) and v == a for a in args)
    if origin is tuple and args[1:] != (...,):
        return _record([accepts(a) for a in args])
    if origin in (tuple, list, frozenset):
        return _each(origin, accepts(args[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(accepts(args[0]), accepts(args[1]))
    if hint is float:
        return lambda v: type(v) is float or type(v) is int
    if hint in _EXACT:
        return lambda v: type(v) is hint
    kind = types.NoneType if hint is None else origin or hint
    if not isinstance(kind, type):
        raise TypeError(f"a field of the type {hint} is not to be checked")
    return lambda v: isinstance(v, kind)


def _any(hints: tuple[Any, ...]) -> Test | None:
    if all(h in (*_EXACT, types.NoneType) for h in hints):
        return lambda v: type(v) in hints
    tests = [t for h in hints if (t := accepts(h)) is not None]
    if len(tests) < len(hints):
        return None
    return lambda v: any(t(v) for t in tests)


def _record(tests: list[Test | None]) -> Test:
    def test(value: Any) -> bool:
        if not isinstance(value, tuple) or len(value) != len(tests):
            return False
        return all(t is None or t(v) for t, v in zip(tests, value, strict=True))

    return test


def _each(kind: Any, one: Test | None) -> Test:
    if one is None:
        return lambda v: isinstance(v, kind)
    return lambda value: isinstance(value, kind) and all(map(one, value))


def _mapping(key: Test | None, item: Test | None) -> Test:
    def test(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        return all((key is None or key(k)) and (item is None or item(v)) for k, v in value.items())

    return test

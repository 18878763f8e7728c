"""Symbolic numbers that look like plain ones to the user's Python.

While a function is recorded, `x.shape[0]` may be a `SymInt`. Arithmetic and comparisons on it are recorded
or become assumptions of the entry; so do `int(n)` and `range(n)`. The rest of Python would see an odd object,
and a result could be silently wrong. So, when code of the user's asks,

    isinstance(n, int)       is true: the class shown is `int` (`float`, `bool`)
    str(n), f"{n:>4}"        show the number, which the entry assumes from then on
    n > 4                    is true or false, which the entry assumes from then on
    n * 0.1 * 3              is not recorded if sympy's expression computes it in another order

What nobody can notice is said in docs/differences.md: `type(n) is int`, `n is m`.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, sym_float

from aheadgrad.errors import NeedsNumbers
from aheadgrad.torchlayer.fake import GuardOnDataDependentSymNode
from aheadgrad.torchlayer.lock import must_be_held
from aheadgrad.torchlayer.symbols import expression, is_symbolic

_PLAIN: dict[type, Any] = {SymInt: int, SymFloat: float, SymBool: bool}
_EXACT = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")
_FOR_SIZES = ("__mod__", "__rmod__", "__floordiv__", "__rfloordiv__")
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_CONVERSIONS = ((SymInt, "__int__"), (SymInt, "__index__"), (SymBool, "__bool__"), (SymInt, "__bool__"))
_active = threading.local()  # in this thread: which files are the user's
_users = 0  # how many recordings are under way
_undo: list[Callable[[], None]] = []


@contextmanager
def shown_to(is_users: Callable[[str], bool], *, computed: bool = False) -> Iterator[None]:
    """Inside, in this thread, symbolic numbers look plain to code in files of the user's.

    `computed`: what sympy's expressions do in another order is computed step by step, by tensors.

    What cannot be so raises `NeedsNumbers`, once more at the end if the user's code caught it.
    """
    global _users
    before = getattr(_active, "is_users", None), getattr(_active, "refused", None)
    must_be_held()
    if not _users:
        _install()
    _users += 1
    _active.is_users, _active.refused = functools.cache(is_users), None
    told, _active.computed = getattr(_active, "computed", False), computed
    try:
        yield
        if _active.refused is not None:
            raise _active.refused
    finally:
        _active.is_users, _active.refused = before
        _active.computed = told
        _users -= 1
        if not _users:
            while _undo:
                _undo.pop()()


def _asked_by_user() -> bool:
    """Is the caller of the method that asks this code of the user's?"""
    is_users = getattr(_active, "is_users", None)
    if is_users is None:
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen"):
        frame = frame.f_back  # an abstract base class asks for whoever asks it
    return frame is not None and bool(is_users(frame.f_code.co_filename))


def _install() -> None:
    for cls, plain in _PLAIN.items():
        _show_class(cls, plain)
        _put(cls, "__repr__", _shown_text(cls.__repr__, plain))
        _put(cls, "__format__", _shown_format(cls.__format__, plain))
    for cls in (SymInt, SymFloat):
        for name in _COMPARISONS:
            _put(cls, name, _decided(getattr(cls, name)))
    for cls, name in _CONVERSIONS:
        _put(cls, name, _converted(getattr(cls, name)))
    for name in _EXACT:
        _put(SymFloat, name, _exact(getattr(SymFloat, name), name))
    for name in _FOR_SIZES:
        _put(SymFloat, name, _for_sizes(getattr(SymFloat, name)))


def _put(cls: type, name: str, value: Any) -> None:
    before = cls.__dict__.get(name)
    undo = functools.partial(delattr, cls, name)
    _undo.append(undo if before is None else functools.partial(setattr, cls, name, before))
    setattr(cls, name, value)


def _show_class(cls: type, plain: type) -> None:
    """What `isinstance` asks an object for when its type will not do. Set in the ordinary way, `__class__`
    would be that of the class itself, so the property goes into the table of the class directly."""
    table: dict[str, Any] = gc.get_referents(cls.__dict__)[0]

    def forget_lookups() -> None:
        cls.__doc__ = cls.__doc__  # Python remembers what it found in a class until something is set

    def undo() -> None:
        del table["__class__"]
        forget_lookups()

    table["__class__"] = property(lambda self: plain if _asked_by_user() else cls)
    forget_lookups()
    _undo.append(undo)


def _plainly(value: Any, plain: Any) -> Any:
    """The number itself, for the user's code."""
    try:
        return plain(value)
    except GuardOnDataDependentSymNode as error:
        _active.refused = error
        raise


def _shown_text(original: Any, plain: Any) -> Any:
    def __repr__(self: Any) -> str:
        return repr(_plainly(self, plain)) if _asked_by_user() else str(original(self))

    return __repr__


def _shown_format(original: Any, plain: Any) -> Any:
    def __format__(self: Any, spec: str) -> str:
        return format(_plainly(self, plain), spec) if _asked_by_user() else str(original(self, spec))

    return __format__


def _decided(original: Any) -> Any:
    @functools.wraps(original)
    def comparison(self: Any, other: Any) -> Any:
        out = original(self, other)
        if isinstance(out, SymBool) and _asked_by_user() and out.node.hint is not None:
            return bool(out)
        return out

    return comparison


def _converted(original: Any) -> Any:
    """Where no number stands behind a symbol (`x[mask].shape[0]`), and the user's code may go on without."""

    @functools.wraps(original)
    def conversion(self: Any) -> Any:
        try:
            return original(self)
        except GuardOnDataDependentSymNode as error:
            if _asked_by_user():
                _active.refused = error
            raise

    return conversion


def _exact(original: Any, name: str) -> Any:
    """Sympy joins `(n * 0.1) * 3` to `n * 0.3`, which rounds another way."""

    @functools.wraps(original)
    def operation(self: Any, other: Any) -> Any:
        out = original(self, other)
        if getattr(_active, "is_users", None) is None or not isinstance(out, SymFloat):
            return out
        if _in_order(out, self, other):
            return out
        if _active.computed:
            number = torch.ones((), dtype=torch.float64, device="cpu").mul(self)
            return getattr(number, name)(other).item()
        _active.refused = NeedsNumbers("a float that depends on sizes is computed in more than one step")
        raise _active.refused

    return operation


def _for_sizes(original: Any) -> Any:
    """Sympy's remainders are exact for numbers that follow from sizes; Python's floats round on the way."""

    @functools.wraps(original)
    def operation(self: Any, other: Any) -> Any:
        out = original(self, other)
        if getattr(_active, "is_users", None) is None or not is_symbolic(out):
            return out
        if all(symbol.is_integer for symbol in expression(out).free_symbols):
            return out
        _active.refused = NeedsNumbers("the remainder of a float that changes is taken")
        raise _active.refused

    return operation


def _may_be_odd(made: Any, operands: set[Any]) -> bool:
    """May this be a zero with a sign, added to a zero? Floats that are given are any; sizes are not."""
    return 0 in operands and not all(symbol.is_integer for symbol in made.free_symbols)


def _in_order(out: Any, a: Any, b: Any) -> bool:
    """Does the expression compute what Python would, in this one step?"""
    operands = {expression(sym_float(v)) if is_symbolic(v) else float(v) for v in (a, b)}
    made = expression(out)
    if len(made.args) == 2 and all(part in operands or -part in operands for part in made.args):
        return True
    one_is_0_or_1 = made.free_symbols and (made in operands or -made in operands)
    return bool(one_is_0_or_1 and not _may_be_odd(made, operands))

"""Whose code something is: only the user's own is expected to change while a program runs."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

from aheadgrad.capture.origins import is_users


@functools.cache
def is_own_code(filename: str | None) -> bool:
    """Is this code whose globals may change: not a library's?"""
    if filename is None or not is_users(filename):
        return False
    if filename.startswith("<"):  # generated, perhaps with a library's name in it
        return True
    return "site-packages" not in filename and not filename.startswith(inspect.__file__.rsplit("/", 1)[0])


def is_own_class(cls: type) -> bool:
    return is_own_code(getattr(sys.modules.get(cls.__module__), "__file__", "<unknown>"))


def is_own_module(module: types.ModuleType) -> bool:
    """A file of the user's, or a module made by hand."""
    filename = getattr(module, "__file__", None)
    made_by_hand = filename is None and getattr(module, "__spec__", None) is None
    return made_by_hand or is_own_code(filename)


def is_own_method(value: Any) -> bool:
    """A method of the user's, on whatever class: a graph module's class has one that was generated."""
    value = function_of(value)
    return isinstance(value, types.FunctionType) and is_own_code(value.__code__.co_filename)


def function_of(value: Any) -> Any:
    """The function inside a method of any kind."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return getattr(value, "__func__", value)


def is_generated(fn: types.FunctionType) -> bool:
    """A method that `dataclass` made."""
    return fn.__code__.co_filename == "<string>"


def answers_names(cls: type) -> bool:
    """Does a class of the user's answer names by a `__getattr__` of its own?"""
    return is_own_method(inspect.getattr_static(cls, "__getattr__", None))


def is_looked_into(cls: type) -> bool:
    """Does a class answer subscripts and names by code of its own?"""
    return any(isinstance(getattr(cls, n, None), types.FunctionType) for n in ("__getitem__", "__getattr__"))

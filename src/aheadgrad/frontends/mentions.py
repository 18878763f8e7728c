"""Which attributes a piece of code may ask for, from its bytecode alone.

`self.scale` mentions `scale`; so does `getattr(self, "scale")`. With a name that is computed the code may
ask for anything, which is noted as the name `ANY`. A name of which the code asks whether it is there
(`hasattr`, `getattr` with a default, an AttributeError caught) is noted once more as `?name`.
"""

from __future__ import annotations

import dis
import functools
import types

ANY = "any name at all"
_WHOLE = {"vars", "__dict__", "attrgetter", "asdict", "astuple", "fields", "replace", "__getattribute__"}
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
_LOADS = {"LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"}
_NO_MATTER = {"PUSH_NULL", "PRECALL", "CACHE", "RESUME", "NOP", "COPY_FREE_VARS", "LOAD_FAST_CHECK"}


_NUMBERS = {"int", "float", "bool"}
_COMPARISONS = {"IS_OP", "COMPARE_OP", "CONTAINS_OP"}
_ROWS = {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET"}


def asked(name: str) -> str:
    return "?" + name


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that the code and the functions inside it mention."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= names_in(const)
    if not _WHOLE.isdisjoint(code.co_names):
        found.add(ANY)
    if not _BY_NAME.isdisjoint(code.co_names):
        found |= _asked_by_name(code)
    if "AttributeError" in code.co_names:
        found |= {asked(name) for name in code.co_names}
    return frozenset(found)


def _asked_by_name(code: types.CodeType) -> set[str]:
    """The names given to `getattr` and its kin, `ANY` where one is not a constant."""
    found = set()
    steps = [i for i in dis.get_instructions(code) if i.opname not in _NO_MATTER]
    for k, step in enumerate(steps):
        if step.argval not in _BY_NAME or step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        rest = steps[k + 1 :]
        whose = 1 if rest and rest[0].opname in _LOADS else len(rest)
        while whose < len(rest) and rest[whose].opname == "LOAD_ATTR":
            whose += 1
        name = rest[whose].argval if whose < len(rest) and rest[whose].opname == "LOAD_CONST" else None
        found |= {name, asked(name)} if isinstance(name, str) else {ANY}
    return found


@functools.cache
def compares_types(code: types.CodeType) -> bool:
    """Does the code compare a type with that of a number, as in `type(n) is int`?"""
    if "type" in code.co_names and not _NUMBERS.isdisjoint(code.co_names):
        steps = [i for i in dis.get_instructions(code) if i.opname not in _NO_MATTER]
        for k, step in enumerate(steps):
            if (
                step.argval in _NUMBERS
                and step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
                and _compared(steps[k:])
            ):
                return True
    return any(isinstance(const, types.CodeType) and compares_types(const) for const in code.co_consts)


def _compared(steps: list[dis.Instruction]) -> bool:
    """Is what is loaded first (alone, or in a row of such) compared next?"""
    for step in steps:
        if step.opname in _COMPARISONS:
            return True
        if step.opname not in _ROWS and step.argval not in _NUMBERS:
            return False
    return False

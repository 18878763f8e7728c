"""Which attributes a piece of code may ask for, from its bytecode alone.

`self.scale` mentions `scale`; so does `getattr(self, "scale")`. With a name that is computed the code may
ask for anything, which is noted as the name `ANY`. A name of which the code asks whether it is there
(`hasattr`, `getattr` with a default, an AttributeError caught) is noted once more as `?name`.

`reads_in` leaves out the names that the code only writes to: `self.log.append(x)`, `self.calls += 1`.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections import Counter
from collections.abc import Iterator

ANY = "any name at all"
EQUAL = "=="  # two things that may be objects are compared
_WHOLE = {
    "vars",
    "__dict__",
    "attrgetter",
    "asdict",
    "astuple",
    "fields",
    "replace",
    "__getattribute__",
    "dir",
}
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
_CATCHES = {"AttributeError", "NameError", "Exception", "BaseException"}
_LOADS = {"LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"}
_NO_MATTER = {"PUSH_NULL", "PRECALL", "CACHE", "RESUME", "NOP", "COPY_FREE_VARS", "LOAD_FAST_CHECK"}
_NAMED = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_ADDS = {"append", "extend", "add", "update", "insert", "appendleft"}
_HIDES = {"eval", "exec", "globals", "locals", "__import__"}
_PLAIN = {"shape", "dtype", "device", "ndim", "layout", "__class__", "size", "dim", "numel"}


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
    if not _CATCHES.isdisjoint(code.co_names) or _catches_all(code):
        found |= {asked(name) for name in code.co_names}
    return frozenset(found | _hidden_names(code))


@functools.cache
def reads_in(code: types.CodeType, updates: bool = False) -> frozenset[str]:
    """The names whose value the code looks at, rather than only writing to them.

    Those of counters (`self.calls += 1`) only with `updates`.
    """
    steps = _steps(code)
    loads = Counter(s.argval for k, s in enumerate(steps) if s.opname in _NAMED and not _only_adds(steps, k))
    if not updates:
        loads.subtract(_updated(steps))
    found = frozenset(name for name, count in loads.items() if count > 0)
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    by_name = names_in(code).difference(code.co_names, *map(names_in, inner))
    return found.union(by_name, *(reads_in(const, updates) for const in inner))


@functools.cache
def hides_in(code: types.CodeType) -> str | None:
    """What the code calls that runs or reads what its bytecode does not show: `eval`, `globals`."""
    names = _HIDES.intersection(code.co_names)
    if names:
        for step in _steps(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in names:
                return str(step.argval)
    inner = (hides_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return next(filter(None, inner), None)


@functools.cache
def imports_in(code: types.CodeType) -> frozenset[str]:
    """The modules that the code imports when it runs."""
    found = {s.argval for s in _steps(code) if s.opname == "IMPORT_NAME"} if code.co_names else set()
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= imports_in(const)
    return frozenset(found)


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in _NO_MATTER]


def _only_adds(steps: list[dis.Instruction], k: int) -> bool:
    """Is what step `k` loads only added to: `x.append(...)`, `x[key] = ...`?"""
    one, two = (*steps[k + 1 : k + 3], None, None)[:2]
    if one is not None and one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.argval in _ADDS:
        return True
    return two is not None and one is not None and two.opname == "STORE_SUBSCR" and _is_load(one)


def _updated(steps: list[dis.Instruction]) -> Iterator[str]:
    """The names that `x += ...`, `self.x += ...` and `x[key] += ...` load and store again."""
    for k, step in enumerate(steps):
        if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            after = next((s for s in steps[k + 1 :] if s.opname != "SWAP"), step)
            if after.opname.startswith("STORE_") and after.opname != "STORE_SUBSCR":
                yield after.argval
        copies = [s.opname for s in steps[k + 2 : k + 5]] == ["COPY", "COPY", "BINARY_SUBSCR"]
        if copies and step.opname in _NAMED and _is_load(steps[k + 1]):
            yield step.argval


def _is_load(step: dis.Instruction) -> bool:
    return step.opname in _LOADS or step.opname == "LOAD_CONST"


def _hidden_names(code: types.CodeType) -> set[str]:
    """Names that are constants: of `case K(scale=s)`, of "{0.scale}".format; and `==` between objects."""
    found: set[str] = set()
    steps = _steps(code)
    for before, step in zip([None, *steps], steps, strict=False):
        if before is None:
            continue
        if step.opname == "MATCH_CLASS" and isinstance(before.argval, tuple):
            found |= set(before.argval) | {asked(name) for name in before.argval} | {"__match_args__"}
            found |= {ANY} if step.arg else set()
        if _compares(step) and before.opname != "LOAD_CONST" and before.argval not in _PLAIN:
            found.add(EQUAL)
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in ("format", "format_map"):
            text = before.argval
            if not isinstance(text, str) or before.opname != "LOAD_CONST" or "." in text or "[" in text:
                found.add(ANY)
    return found


def _compares(step: dis.Instruction) -> bool:
    return step.opname == "CONTAINS_OP" or (
        step.opname == "COMPARE_OP" and str(step.argval).strip("bol()") in ("==", "!=")
    )


def _catches_all(code: types.CodeType) -> bool:
    """Is there an `except:` without a name?"""
    if not getattr(code, "co_exceptiontable", b""):
        return False
    steps = _steps(code)
    after = itertools.pairwise(steps)
    return any(a.opname == "PUSH_EXC_INFO" and b.opname == "POP_TOP" for a, b in after)


def _asked_by_name(code: types.CodeType) -> set[str]:
    """The names given to `getattr` and its kin, `ANY` where one is not a constant."""
    found = set()
    steps = _steps(code)
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
        steps = _steps(code)
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

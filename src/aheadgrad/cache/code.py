"""Code as text: whose it is, and a digest that tells whether it is the same in another process."""

from __future__ import annotations

import dis
import hashlib
import os
import sysconfig
from importlib.util import resolve_name
from types import CodeType
from typing import Any

import torch

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PYTHON = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_NEEDS = (
    "numpy",
    "sympy",
    "mpmath",
    "networkx",
    "opt_einsum",
    "tqdm",
    "typing_extensions.py",
)  # torch runs these by itself
_TORCH_NEEDS = tuple(os.path.join(os.path.dirname(_TORCH[:-1]), name) for name in _NEEDS)
_known: dict[int, tuple[CodeType, str]] = {}  # by id; the code itself, so that the id stays its own
_whose: dict[str, str] = {}


def whose(filename: str) -> str:
    """ "torch", "python" or "ours" for code that is the same as long as versions are; otherwise ""."""
    known = _whose.get(filename)
    if known is None:
        known = _whose[filename] = _owner(filename)
    return known


def is_torch(code: CodeType) -> bool:
    """Is it torch's, and not that of a package which torch needs?"""
    return code.co_filename.startswith(_TORCH)


def _owner(filename: str) -> str:
    if filename.startswith((_TORCH, *_TORCH_NEEDS)):
        return "torch"
    if filename.startswith(_ROOT + "testing" + os.sep):
        return ""
    if filename.startswith((_ROOT, "<aheadgrad ")):
        return "ours"
    if filename.startswith("<frozen"):
        return "python"
    standard = filename.startswith(PYTHON) and not any(part in filename for part in _INSTALLED)
    return "python" if standard else ""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def code_digest(code: CodeType) -> str:
    """Everything in it: instructions, constants, names, lines."""
    known = _known.get(id(code))
    if known is not None:
        return known[1]
    parts = [
        code.co_code.hex(),
        code.co_linetable.hex(),
        code.co_exceptiontable.hex(),
        *(str(part) for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)),
        *(str(part) for part in (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)),
        *(str(part) for part in (code.co_flags, code.co_filename, code.co_firstlineno, code.co_qualname)),
        *map(_constant, code.co_consts),
    ]
    made = digest("\0".join(parts))
    _known[id(code)] = code, made
    return made


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return f"code {code_digest(value)}"
    if isinstance(value, frozenset):  # which has another order in each process
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_constant, value))}"
    return f"{type(value).__name__} {value!r}"


def codes_in(code: CodeType) -> list[CodeType]:
    """A code object, and those of what is defined inside."""
    inside = [c for c in code.co_consts if isinstance(c, CodeType)]
    return [code, *(found for c in inside for found in codes_in(c))]


_SETS = {"BUILD_SET", "SET_ADD", "SET_UPDATE"}
_SET_NAMES = set("set frozenset union intersection difference symmetric_difference".split())
_LIKE_SETS = {"keys", "items"}
_OF_SETS = {"&", "|", "^", "-", "&=", "|=", "^=", "-="}


def globals_in(code: CodeType) -> set[str]:
    """The names that some code looks for in its module, and in `builtins`."""
    return {
        str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def imports_in(code: CodeType, space: dict[str, Any]) -> list[str]:
    """The modules that some code imports when it runs, with those around them; `space` has its globals."""
    found: dict[str, None] = {}
    told = list(dis.get_instructions(code))
    for i, one in enumerate(told):
        if one.opname == "IMPORT_NAME":
            level = told[i - 2].argval
            package = str(space.get("__package__") or str(space.get("__name__")).rpartition(".")[0])
            name = resolve_name("." * int(level) + str(one.argval), package)
            parts = name.split(".")
            found.update(dict.fromkeys(".".join(parts[: n + 1]) for n in range(len(parts))))
    return list(found)


def makes_sets(code: CodeType) -> bool:
    """Can a set come about in it? Its order depends on hashes, which are others in each process."""
    names = set(code.co_names)
    for one, after in zip(told := list(dis.get_instructions(code)), [*told[1:], None], strict=True):
        if one.opname in _SETS:
            return True
        if isinstance(one.argval, frozenset) and after and after.opname != "CONTAINS_OP":
            return True
        if one.opname == "BINARY_OP" and one.argrepr in _OF_SETS and names & _LIKE_SETS:
            return True
    return bool(names & _SET_NAMES)

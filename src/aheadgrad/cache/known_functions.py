"""Functions that give the same in each process, if what they are given is the same.

Those of Python's library and of C are listed: what is not in the list may read a clock, a file, a setting or
an address, and nobody could tell. Torch's own C functions are known to `torchlayer.told_functions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import Any

from aheadgrad.cache.code import PYTHON
from aheadgrad.torchlayer.told_functions import unknown_in_torch

# Modules of Python's library, and of C.
_CALM = set(
    "_abc _bisect _collections _collections_abc _csv _functools _heapq _json _operator _sre _statistics "
    "_string _struct _warnings _weakrefset abc bisect builtins cmath codecs collections contextlib copy "
    "copyreg dataclasses enum fractions functools heapq itertools json keyword logging math "
    "numbers operator re reprlib sre_compile sre_parse statistics string textwrap types typing "
    "unicodedata warnings weakref".split()
)
_BUILTINS = set("id hash input open globals locals eval exec compile breakpoint __import__".split())
_QUIET = {"abc", "contextlib", "enum", "typing", "warnings", "logging"}  # nothing comes back from these
_ASKING = set(
    "Logger.isEnabledFor Logger.getEffectiveLevel Logger.hasHandlers getLogger get_type_hints".split()
)
_IMPORTS = (
    "importlib._bootstrap",
    "importlib._bootstrap_external",
    "zipimport",
)  # `code.imports_in` has these
_OF_TORCH = re.compile(
    r"(inspect|logging)\b|(builtins\.(id|hash)|_contextvars\.\w+(\.\w+)?|_weakref\.\w+|_thread.*)$"
)
# Classes of C; their methods depend on what they are given.
_CLASSES = set(
    "BaseException bool bytearray bytes cell classmethod code complex dict dict_items dict_keys dict_values "
    "float frozenset function generator int list mappingproxy memoryview method object property range set "
    "slice staticmethod str super tuple type collections.OrderedDict collections.defaultdict "
    "collections.deque functools.partial numpy.dtype numpy.generic numpy.ndarray numpy.ufunc re.Match "
    "re.Pattern types.GenericAlias types.SimpleNamespace types.UnionType".split()
)
_ADDRESSES = {"__hash__", "__reduce__", "__reduce_ex__", "tofile", "dump", "__sizeof__"}
_CLASS_METHODS = set(
    "apply from_bytes fromhex fromkeys maketrans _make_subclass __new__ __init_subclass__".split()
)
_NUMPY = set(
    "arange array asanyarray asarray ascontiguousarray bincount broadcast concatenate copyto dot empty "
    "empty_like einsum c_einsum inner lexsort matmul ones promote_types ravel_multi_index result_type "
    "unravel_index vdot where zeros can_cast normalize_axis_index _array_converter interp".split()
)
_FUNCTION = re.compile(r"<built-in method (?:([\w.]+)\.)?(\w+)( of type object at \w+)?>")
_METHOD = re.compile(r"<(?:method|slot wrapper|class method) '(\w+)' of '([\w.]+)'")
_OF_TENSOR = re.compile(r"<function Tensor\.(\w+) at")
_KNOWN = re.compile(r"__(instance|subclass)check__|torch\._ops\.")
# What torch does to run any op at all: it is the same for the same ops.
_INSIDE = re.compile(
    r"/torch/(_ops|_subclasses|_library|_dynamo|_meta_registrations|_prims|_refs|_decomp|_logging|_guards|fx/|"
    r"utils/(_python_dispatch|_stats|checkpoint))"
)
_WITH_CALLBACKS = re.compile(
    r"builtins\.(sorted|max|min|sum|any|all|repr|ascii|format|print|round|abs|divmod|pow)>|"
    r"_functools\.reduce|'(sort|format|format_map|join)' of"
)


def unknown_in_c(called: str) -> str:
    """What a function of C is called, if it is not in the list. `called` is what the profiler writes."""
    if match := _METHOD.match(called):
        name, kind = match[1], match[2]
        if kind.startswith("torch.") or "Backward" in kind:
            return unknown_in_torch(kind, name)
        return "" if kind in _CLASSES and name not in _ADDRESSES else f"{kind}.{name}"
    if match := _OF_TENSOR.match(called):  # which Python's own class has a method for, too
        return unknown_in_torch("torch._C.TensorBase", match[1])
    match = _FUNCTION.match(called)
    if match is None:
        return "" if _KNOWN.search(called) else called.strip("<>")
    module, name = match[1] or "", match[2]
    if not module:
        return "" if name in _CLASS_METHODS else name
    if module.partition(".")[0] == "torch":
        return unknown_in_torch(module, name)
    if module in ("numpy", "numpy._core._multiarray_umath", "numpy._core.multiarray"):
        return "" if name in _NUMPY else f"{module}.{name}"
    known = module in _CALM and not (module == "builtins" and name in _BUILTINS)
    return "" if known else f"{module}.{name}"


def unknown_in_python(code: CodeType) -> str:
    """What a function of Python's library is called, if its module is not in the list."""
    module = module_of(code)
    known = module in _IMPORTS or (module.partition(".")[0] in _CALM and code.co_qualname not in _ASKING)
    return "" if known else f"{module}.{code.co_qualname}"


def is_of_torch(unknown: str) -> bool:
    """May torch ask for this? What it gives does not depend on it."""
    return _OF_TORCH.match(unknown) is not None


def module_of(code: CodeType) -> str:
    """The name of a module of Python's library, by its file."""
    name = code.co_filename.removeprefix("<frozen ").removesuffix(">")
    for place in PYTHON:
        name = name.removeprefix(place)
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def goes_on(called: CodeType | str) -> Callable[[Any], bool]:
    """Which of the functions that this calls are of interest. The profiler does not tell apart by whom a
    function of C was called: some call what they are given. Python's own may ask for an `id`."""
    if isinstance(called, str):
        return _anything if _WITH_CALLBACKS.search(called) else _nothing
    file = called.co_filename
    if "/torch/" in file or "/numpy/" in file:
        return _nothing if runs_ops(called) else _anything
    return _nothing if module_of(called) in (*_QUIET, *_IMPORTS) else _code


def runs_ops(code: CodeType) -> bool:
    """Is it a part of torch that runs ops?"""
    return _INSIDE.search(code.co_filename) is not None


def _anything(_: Any) -> bool:
    return True


def _nothing(_: Any) -> bool:
    return False


def _code(called: Any) -> bool:
    return isinstance(called, CodeType)

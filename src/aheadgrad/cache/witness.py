"""What Python ran while a function was recorded, forward and backward.

Python's own profiler counts the calls, in C; times are nobody's business here. It tells who called whom:

    ran       code that is neither torch's, Python's nor ours; what only an `import` ran is left out
    texts     those of them that were given to `exec`, maybe by torch for itself
    beneath   torch's own code that it called: the settings which that names are compared, too
    doubts    what reads something that nobody compares: any function of C, or of Python's library, that is
              not known to give the same in each process (`known_functions`)
"""

from __future__ import annotations

import _lsprof
import re
from collections.abc import Iterator
from contextlib import ExitStack
from types import CodeType
from typing import Any

from torch import nn
from torch.autograd.grad_mode import set_multithreading_enabled

from aheadgrad.cache.code import is_torch, whose
from aheadgrad.cache.known_functions import goes_on, is_of_torch, runs_ops, unknown_in_c, unknown_in_python
from aheadgrad.torchlayer.fake import new_mode

_IMPORTS = re.compile(r"<frozen importlib|<built-in method builtins\.(exec|__build_class__|__import__)>")
_GRAPH = "<eval_with_key>"  # Dynamo's, which is told node by node
_MODULE = nn.Module._wrapped_call_impl.__code__
Calls = dict[Any, list[Any]]


class Witness:
    """`with witness: ...` finds the code objects that ran, and what cannot be the same elsewhere."""

    def __init__(self) -> None:
        self.ran: list[CodeType] = []
        self.texts: set[CodeType] = set()
        self.beneath: list[CodeType] = []
        self.doubts: list[str] = []
        self._profiler = _lsprof.Profiler()
        self._stack = ExitStack()

    def __enter__(self) -> None:
        new_mode(dynamic=False)  # it loads what takes its time, and much more of it if one counts
        self._stack.enter_context(set_multithreading_enabled(False))  # backward code runs here, not elsewhere
        try:
            self._profiler.enable(True, True)
        except ValueError:
            self.doubts.append("a profiler is active")

    def __exit__(self, *_: object) -> None:
        self._profiler.disable()
        self._stack.close()
        if not self.doubts:
            self._read(self._profiler.getstats())
        self._profiler.clear()

    def _read(self, stats: list[Any]) -> None:
        calls = {one.code: [sub.code for sub in one.calls or ()] for one in stats}
        users = {code for code in _reached(calls) if _is_users(code)}
        texts = {code for code in users if code.co_filename == "<string>"}
        self.texts = texts - {sub for code in users for sub in calls[code]}
        users -= {text for text in self.texts if _is_of_python(text)}
        beneath: set[CodeType] = set()
        roots = users | {code for code in (_MODULE,) if code in calls}
        for code in roots:
            for other, unknown in _beneath(code, calls):
                if unknown:
                    told = (
                        f"{code.co_qualname} calls {unknown}, which may tell another process something else"
                    )
                    self.doubts.append(told)
                elif (
                    isinstance(other, CodeType)
                    and whose(other.co_filename) == "torch"
                    and not runs_ops(other)
                ):
                    beneath.add(other)
        self.ran, self.beneath = (sorted(found, key=_place) for found in (users, beneath))
        self.doubts.sort()


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_qualname


def _is_users(code: Any) -> bool:
    return isinstance(code, CodeType) and not whose(code.co_filename) and _GRAPH not in code.co_filename


def _is_of_python(text: CodeType) -> bool:
    """Was it run at once, or written for a dataclass or a named tuple?"""
    name = text.co_qualname
    return name == "<module>" or name.startswith("__create_fn__.") or text.co_names == ("_tuple_new",)


def _reached(calls: Calls) -> Iterator[Any]:
    """All that was called, but for what an import did."""
    called = {code for codes in calls.values() for code in codes}
    left = [code for code in calls if code not in called]  # who was called by nobody: we began there
    seen = set(left)
    while left:
        code = left.pop()
        if _IMPORTS.search(code if isinstance(code, str) else code.co_filename):
            continue
        yield code
        inside = [c for c in code.co_consts if c in calls] if _is_users(code) else []  # bodies of classes
        new = [other for other in (*calls.get(code, ()), *inside) if other not in seen]
        seen.update(new)
        left += new


def _beneath(code: CodeType, calls: Calls) -> Iterator[tuple[Any, str]]:
    """What some code called, through functions of torch's and Python's; with a text if it is not known."""
    left, seen = [(code, other) for other in calls.get(code, ())], set()
    while left:
        by, other = left.pop()
        owner = whose(other.co_filename) if isinstance(other, CodeType) else "C"
        unknown = unknown_in_c(str(other)) if owner == "C" else ""
        if owner == "python":
            unknown = unknown_in_python(other)
        if unknown and is_torch(by) and is_of_torch(unknown):
            continue
        yield other, unknown
        if owner in ("C", "torch", "python") and other not in seen:
            seen.add(other)
            left += ((other, one) for one in filter(goes_on(other), calls.get(other, ())))

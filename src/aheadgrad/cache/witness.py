"""What Python ran while a function was recorded: all code that is neither torch's, Python's nor ours.

Python's own profiler counts the calls, in C; times are nobody's business here. It tells who called whom, so
that what only an `import` ran can be left out, and what was generated for classes of torch's.
"""

from __future__ import annotations

import _lsprof
import re
from types import CodeType
from typing import Any

from aheadgrad.cache.code import whose
from aheadgrad.torchlayer.fake import new_mode

# What reads the world: another process may be told something else.
_WORLD = set(
    "_io _random _socket _thread asyncio datetime gc glob importlib inspect io locale nt os pathlib platform "
    "posix random secrets select shutil signal site socket subprocess sys tempfile threading time urllib "
    "uuid".split()
)
_BUILTINS = {f"builtins.{name}" for name in "id hash input open globals locals eval exec __import__".split()}
_IMPORTS = "<frozen importlib"
_HARMLESS = re.compile(r"\b(logging|warnings|contextlib|abc|typing|enum)\b")  # nothing comes back from these
_NAME = re.compile(r"<built-in method ([\w.]+)|<method '\w+' of '([\w.]+)'")


class Witness:
    """`with witness: ...` finds the code objects that ran (`ran`), and what cannot be the same elsewhere."""

    def __init__(self) -> None:
        self.ran: list[CodeType] = []
        self.doubts: list[str] = []
        self._profiler = _lsprof.Profiler()

    def __enter__(self) -> None:
        new_mode(dynamic=False)  # it loads what takes its time, and much more of it if one counts
        try:
            self._profiler.enable(True, True)
        except ValueError:
            self.doubts.append("a profiler is active")

    def __exit__(self, *_: object) -> None:
        self._profiler.disable()
        if not self.doubts:
            self._read(self._profiler.getstats())
        self._profiler.clear()

    def _read(self, stats: list[Any]) -> None:
        calls = {one.code: [sub.code for sub in one.calls or ()] for one in stats}
        called = {code for codes in calls.values() for code in codes}
        left = [code for code in calls if code not in called]  # who was called by nobody: we began there
        seen = set(left)
        foreign = called - {sub for code, subs in calls.items() if _is_users(code) for sub in subs}
        while left:
            code = left.pop()
            if isinstance(code, str) or code.co_filename.startswith(_IMPORTS):
                continue
            users = not whose(code.co_filename) and not (code.co_filename == "<string>" and code in foreign)
            if users:
                self.ran.append(code)
            if users and (world := _world_behind(code, calls)):
                told = f"{code.co_qualname} calls {world}, which may tell another process something else"
                self.doubts.append(told)
            for other in calls.get(code, ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        self.ran.sort(key=lambda code: (code.co_filename, code.co_firstlineno, code.co_qualname))


def _is_users(code: Any) -> bool:
    return isinstance(code, CodeType) and not whose(code.co_filename)


def _world_behind(code: CodeType, calls: dict[Any, list[Any]]) -> str:
    """What asks for something outside, called by this code or by functions of Python's that it calls."""
    left, seen = list(calls.get(code, ())), set()
    while left:
        other = left.pop()
        if world := _world(other):
            return world
        python = isinstance(other, CodeType) and whose(other.co_filename) == "python"
        if python and other not in seen and not _HARMLESS.search(other.co_filename):
            seen.add(other)
            left += calls.get(other, ())
    return ""


def _world(called: Any) -> str:
    """What a function is called that asks for something outside of the process's own values."""
    if isinstance(called, CodeType):
        file = called.co_filename
        module = file.rpartition("/")[2].removesuffix(".py").removeprefix("<frozen ").removesuffix(">")
        package = file.rpartition("/")[0].rpartition("/")[2]
        found = whose(file) == "python" and (module in _WORLD or package in _WORLD)
        return f"{module}.{called.co_name}" if found else ""
    match = _NAME.match(called)
    name = str(match and (match[1] or match[2]))
    return name if name.partition(".")[0] in _WORLD or name in _BUILTINS else ""

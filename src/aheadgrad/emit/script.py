"""The emitter: straight-line Python, readable, registered so that tracebacks and debuggers show it.

script = Script("entry")
script.line("y = mul(x, 2)")
fn = script.function(["x"], ["y"])
"""

from __future__ import annotations

import itertools
import linecache
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from aheadgrad.torchlayer.evalframe import hide_from_dynamo
from aheadgrad.torchlayer.symbols import MODULES, Shape, frozen_number, is_symbolic

if TYPE_CHECKING:
    from aheadgrad.emit.sizes import SizeTexts

_count = itertools.count()


class Namespace:
    """Names for the objects that generated code refers to; equal objects share a name.

    `sizes` writes symbolic numbers, if there can be any.
    """

    def __init__(self, sizes: SizeTexts | None = None) -> None:
        self.values: dict[str, Any] = {} if sizes is None else dict(MODULES)
        self.sizes = sizes
        self._names: dict[int, str] = {}

    def name(self, value: Any, hint: str = "c") -> str:
        known = self._names.get(id(value))
        if known is not None:
            return known
        hint = "".join(ch if ch.isalnum() or ch == "_" else "_" for ch in hint)
        name = hint if hint not in self.values and not hint[0].isdigit() else f"{hint}_{len(self.values)}"
        self.values[name] = value
        self._names[id(value)] = name
        return name

    def literal(self, value: Any) -> str:
        """The value as source text, or a name bound to it."""
        if value is None or (
            isinstance(value, bool | int | str) and type(value) in (bool, int, str, type(None))
        ):
            return repr(value)
        if self.sizes is not None and is_symbolic(value):
            number = frozen_number(value)
            return self.sizes.text(number) if is_symbolic(number) else repr(number)
        if type(value) is Shape or (isinstance(value, torch.Size) and any(map(is_symbolic, value))):
            return f"{self.name(torch.Size, 'Size')}({self.literal(list(value))})"
        if type(value) is float and math.isfinite(value):
            return repr(value)
        if type(value) in (list, tuple):
            parts = [self.literal(v) for v in value]
            inside = ", ".join(parts) + ("," if type(value) is tuple and len(parts) == 1 else "")
            return f"[{inside}]" if type(value) is list else f"({inside})"
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            return self.name(value, str(value).removeprefix("torch."))
        return self.name(value, "const")


class Script:
    """Lines of one function, with indentation and a namespace."""

    def __init__(self, title: str, names: Namespace | None = None) -> None:
        self.title = title
        self.names = names or Namespace()
        self.lines: list[str] = []
        self._indent = 1

    def line(self, text: str) -> None:
        self.lines.append("    " * self._indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(head)
        self._indent += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self._indent -= 1

    def source(self, parameters: str) -> str:
        sizes = self.names.sizes
        first = [] if sizes is None else ["    " + line for line in sizes.lines.values()]
        body = [*first, *self.lines] or ["    pass"]
        return "\n".join([f"def {self.title}({parameters}):", *body, ""])

    def function(self, parameters: str) -> tuple[Callable[..., Any], str]:
        """The compiled function and its source."""
        source = self.source(parameters)
        return build(source, self.title, self.names.values), source


def build(source: str, title: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """Executes source text under a file name that `linecache` knows."""
    filename = f"<aheadgrad {title} {next(_count)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)
    function: Callable[..., Any] = scope[title]
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    hide_from_dynamo(function)
    return function

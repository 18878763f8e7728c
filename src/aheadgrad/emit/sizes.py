"""Symbolic sizes in generated code.

Generated code reads each symbol off an input before anything else happens to the inputs (the forward tells
those that values decide):

    s0 = p1.size(0)
    ...
    p0.as_strided_((3, s0), (1, 3), 0)
"""

from __future__ import annotations

from typing import Any

from aheadgrad.errors import FallbackError
from aheadgrad.joint.level import Joint
from aheadgrad.torchlayer.subclasses import Bundle, values_of
from aheadgrad.torchlayer.symbols import Number, python_text


class SizeTexts:
    """Source text for symbolic numbers in the entry function, and the lines it needs at its start."""

    def __init__(self, joint: Joint, results: dict[Any, str]) -> None:
        """`results`: where the forward gives sizes that values decide."""
        self.results = results
        self.sources: dict[Any, str] = {}
        self.lines: dict[str, str] = {}
        for k, number in enumerate(joint.numbers):
            self.sources.setdefault(number.expr, f"p{len(joint.entrances) + k}")
        for i, e in enumerate(joint.entrances):
            paths = e.value.form.paths(f"p{i}") if type(e.value) is Bundle else [f"p{i}"]
            for value, path in zip(values_of(e.value), paths, strict=True):
                for op, args, number in value.type.shown():
                    method = op.overloadpacket.__name__.removeprefix("sym_")
                    self.sources.setdefault(number.expr, f"{path}.{method}({', '.join(map(repr, args))})")
        for i, e in enumerate(joint.entrances):
            if e.item is not None:
                self.sources.setdefault(e.item.expr, f"p{i}.item()")

    def text(self, value: Number) -> str:
        expr = value.expr
        if expr in self.sources and not expr.is_Symbol:
            name = f"size_{len(self.lines)}"
            self.lines.setdefault(name, f"{name} = {self.sources[expr]}")
            return name
        for symbol in expr.free_symbols:
            if symbol in self.results:
                continue
            if symbol not in self.sources:
                raise FallbackError(f"no input provides the size {symbol}, which an output needs")
            self.lines.setdefault(str(symbol), f"{symbol} = {self.sources[symbol]}")
        return f"({python_text(expr)})"

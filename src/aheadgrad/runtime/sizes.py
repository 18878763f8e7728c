"""Symbolic sizes at run time: numbers in generated code, and tangents of any size.

Generated code reads each symbol off an input before anything else happens to the inputs (the forward tells
those that values decide):

    s0 = p1.size(0)
    ...
    p0.as_strided_((3, s0), (1, 3), 0)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.capture.joint import dense_strides, order_of
from aheadgrad.errors import CaptureError, FallbackError
from aheadgrad.runtime.backward import Backward, Run
from aheadgrad.torchlayer.autocast import AutocastState, autocast_state
from aheadgrad.torchlayer.subclasses import (
    Bundle,
    Form,
    build,
    form_of,
    is_foreign,
    parts_of,
    same_meta,
    values_of,
)
from aheadgrad.torchlayer.symbols import constant_of, expression, places, python_text

if TYPE_CHECKING:
    from aheadgrad.capture.stage import Captured


def _parts_laid_out(t: Tensor, expected: Form) -> Tensor:
    """A tangent that is a subclass, with parts laid out as expected; it must be of the expected kind."""
    if not is_foreign(t) or not same_kind(form := form_of(t), expected):
        raise CaptureError(
            f"A tangent is a {type(t).__name__} where a {expected.kind.__name__} was expected. With dynamic "
            "shapes, backwards are compiled for the expected kind of tangents only."
        )
    parts = parts_of(t)
    made = [_laid_out(p, order_of(e.stride)) for p, e in zip(parts, expected.plain, strict=True)]
    return t if all(map(operator.is_, parts, made)) else build(form, iter(made))


def same_kind(a: Form, b: Form) -> bool:
    """The same but for sizes."""
    if a.kind is not b.kind or a.names != b.names or not same_meta(a.meta, b.meta):
        return False
    pairs = [(x, y) for x, y in zip(a.inner, b.inner, strict=True) if isinstance(x, Form)]
    return all(isinstance(y, Form) and same_kind(x, y) for x, y in pairs)


class SizeTexts:
    """Source text for symbolic numbers in the entry function, and the lines it needs at its start."""

    def __init__(self, captured: Captured, results: dict[Any, str]) -> None:
        """`results`: where the forward gives sizes that values decide."""
        self.results = results
        self.sources: dict[Any, str] = {}
        self.lines: dict[str, str] = {}
        entrances = captured.session.entrances
        for k, number in enumerate(captured.numbers):
            self.sources.setdefault(expression(number), f"p{len(entrances) + k}")
        for i, e in enumerate(entrances):
            paths = e.value.form.paths(f"p{i}") if type(e.value) is Bundle else [f"p{i}"]
            for value, path in zip(values_of(e.value), paths, strict=True):
                for op, args, number in places(value):
                    method = op.overloadpacket.__name__.removeprefix("sym_")
                    text = f"{path}.{method}({', '.join(map(repr, args))})"
                    self.sources.setdefault(expression(number), text)
        for i, e in enumerate(entrances):
            number = captured.session.items.get(id(e.real))
            if number is not None:
                self.sources.setdefault(expression(number), f"p{i}.item()")

    def text(self, value: Any) -> str:
        constant = constant_of(value)
        if constant is not None:
            return repr(constant)
        expr = expression(value)
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


class LaidOutBackward(Backward):
    """One program per set of present tangents, which are given the layout it was recorded with.

    For symbolic sizes, where strides tell little, and for the drop-in, whose compilers expect one
    backward. `orders` has, for each tangent, its dimensions from the outermost in memory inwards.
    """

    def __init__(
        self,
        orders: tuple[Any, ...],
        compiled: Run | None,
        make: Callable[[tuple[bool, ...], AutocastState | None], Run],
        fixed_autocast: bool,
        lock: Any,
    ) -> None:
        super().__init__(orders, None, make, fixed_autocast, lock)
        if compiled is not None:
            self.programs[((True,) * len(orders), None)] = compiled

    def run(self, saved: Any, tangents: tuple[Tensor | None, ...]) -> list[Any]:
        present = tuple(t is not None for t in tangents)
        state = None if self.fixed_autocast else autocast_state()
        program = self.programs.get((present, state))
        if program is None:
            with self._lock:
                program = self.programs.get((present, state))
                if program is None:
                    program = self.programs[(present, state)] = self.make(present, state)
        given = zip(tangents, self.expected, strict=True)
        args = [*saved, *(_laid_out(t, order) for t, order in given if t is not None)]
        if state is None:
            return program(args)
        with state.suspended():
            return program(args)


def _laid_out(t: Tensor, order: Any) -> Tensor:
    if isinstance(order, Form):
        return _parts_laid_out(t, order)
    strides = dense_strides(tuple(t.size()), order)
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)

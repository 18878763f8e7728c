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
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from aheadgrad.capture.joint import order_of
from aheadgrad.errors import CaptureError, FallbackError
from aheadgrad.runtime.backward import Backward, Run
from aheadgrad.torchlayer.autocast import AutocastState, autocast_state
from aheadgrad.torchlayer.autograd import version
from aheadgrad.torchlayer.strides import dense_strides
from aheadgrad.torchlayer.subclasses import (
    Bundle,
    Fixed,
    Form,
    build,
    form_of,
    is_foreign,
    parts_of,
    same_meta,
    values_of,
)
from aheadgrad.torchlayer.symbols import constant_of, expression, is_symbolic, places, python_text

if TYPE_CHECKING:
    from aheadgrad.capture.stage import Captured


def same_kind(a: Form, b: Form) -> bool:
    """The same but for sizes."""
    if a.kind is not b.kind or a.names != b.names or not same_meta(a.meta, b.meta):
        return False
    pairs = [(x, y) for x, y in zip(a.inner, b.inner, strict=True) if isinstance(x, Form)]
    return all(isinstance(y, Form) and same_kind(x, y) for x, y in pairs)


def with_sizes(form: Form, size: tuple[Any, ...]) -> Form:
    """A form with symbolic sizes, where all that it consists of has those of the whole."""
    if not any(map(is_symbolic, size)):
        return form
    inner: list[Any] = []
    for part in form.inner:
        if isinstance(part, Fixed) or tuple(part.size) != tuple(form.size) or not _is_dense(part):
            raise CaptureError(
                f"A tangent is a {form.kind.__name__}, where another kind of tensor was expected, and is not "
                "laid out as its parts are. Compile with dynamic=False for such tangents."
            )
        strides = dense_strides(size, order_of(part.stride))
        inner.append(
            with_sizes(part, size) if isinstance(part, Form) else replace(part, size=size, stride=strides)
        )
    return replace(form, inner=tuple(inner), size=size, stride=dense_strides(size, order_of(form.stride)))


def _is_dense(part: Any) -> bool:
    return bool(tuple(part.stride) == dense_strides(tuple(part.size), order_of(part.stride)))


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


class Unusual(NamedTuple):
    """A tangent of another kind than expected: what a backward for such tangents is recorded with.

    `form` is None for a plain tensor; `order` is that of its dimensions in memory.
    """

    form: Form | None
    order: tuple[int, ...]


Kind = Unusual | bool
"""Of a tangent: missing (False), as expected (True), or unusual."""


class LaidOutBackward(Backward):
    """One program per set of present tangents, which are given the layout it was recorded with.

    For symbolic sizes, where strides tell little, and for the drop-in, whose compilers expect one
    backward. `orders` has, for each tangent, its dimensions from the outermost in memory inwards, or the
    form of the subclass that is expected. A program of plain tensors (`plainly`) serves subclasses of any
    form, which only have to be laid out for it.
    """

    def __init__(
        self,
        orders: tuple[Any, ...],
        compiled: Run | None,
        make: Callable[[tuple[Kind, ...], AutocastState | None], Run],
        fixed_autocast: bool,
        lock: Any,
        *,
        plainly: bool,
    ) -> None:
        super().__init__(orders, None, make, fixed_autocast, lock)
        self.plainly = plainly
        if compiled is not None:
            self.programs[((True,) * len(orders), None)] = compiled

    def run(self, saved: Any, tangents: tuple[Tensor | None, ...]) -> list[Any]:
        kinds = tuple(map(self._kind, tangents, self.expected))
        state = None if self.fixed_autocast else autocast_state()
        program = self.programs.get((kinds, state))
        if program is None:
            with self._lock:
                program = self.programs.get((kinds, state))
                if program is None:
                    program = self.programs[(kinds, state)] = self.make(kinds, state)
        given = zip(tangents, kinds, self.expected, strict=True)
        found = [(t, _as_recorded(t, kind, order)) for t, kind, order in given if t is not None]
        copies = [(t, copy, version(copy)) for t, copy in found if copy is not t]
        args = [*saved, *(laid_out for _, laid_out in found)]
        del found
        with nullcontext() if state is None else state.suspended():
            grads = program(args)
        for t, copy, before in copies:
            if version(copy) != before:  # a custom backward changes the gradient that it is given
                t.copy_(copy)
        return grads

    def _kind(self, t: Tensor | None, expected: Any) -> Kind:
        if t is None:
            return False
        if not is_foreign(t):
            return Unusual(None, order_of(t.stride())) if isinstance(expected, Form) else True
        form = form_of(t)
        if isinstance(expected, Form):
            return True if same_kind(form, expected) else Unusual(form, ())
        return Unusual(None if self.plainly else form, expected if self.plainly else ())


def _as_recorded(t: Tensor, kind: Kind, expected: Any) -> Tensor:
    if isinstance(kind, Unusual):
        return t if kind.form is not None else _laid_out(t, kind.order)
    return _parts_laid_out(t, expected) if isinstance(expected, Form) else _laid_out(t, expected)


def _parts_laid_out(t: Tensor, expected: Form) -> Tensor:
    """A tangent that is a subclass of the expected kind, with parts laid out as expected."""
    parts = parts_of(t)
    made = [_laid_out(p, order_of(e.stride)) for p, e in zip(parts, expected.plain, strict=True)]
    return t if all(map(operator.is_, parts, made)) else build(form_of(t), iter(made))


def _laid_out(t: Tensor, order: Any) -> Tensor:
    strides = dense_strides(tuple(t.size()), order)
    if t.stride() == strides:
        return t
    if is_foreign(t):  # in words that a subclass understands
        back = sorted(range(len(order)), key=order.__getitem__)
        return t.permute(order).contiguous().permute(back)
    return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)

"""A program's ops as lines of Python.

Each value is dropped after its last use, so that memory is freed as early as in eager.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor

from aheadgrad.emit.below import ops_below
from aheadgrad.emit.calls import callee
from aheadgrad.emit.reuse import reused
from aheadgrad.emit.scalars import with_constant
from aheadgrad.emit.script import Namespace, Script
from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import AUTOGRAD, VIEWS, forward_ad, hide, hides
from aheadgrad.torchlayer.symbols import MODULES, Number, python_text

_SUM = torch.ops.aten.sum.dim_IntList
_PORTS = ("primals", "tangents")
_AS_STRIDED_SCATTER = torch.ops.aten.as_strided_scatter.default


def write_body(
    program: Program, script: Script, places: list[str], *, keep_places: bool = False, foreign: bool = False
) -> list[str]:
    """Writes the program's lines on the given local names; returns expressions for its results.

    `keep_places`: the caller goes on with these names. Otherwise they are dropped like any other value.
    `foreign`: some of what comes is of tensor subclasses that the program knows nothing of.
    """
    return _Body(program, script, places, keep_places, foreign).write()


@functools.cache
def local_name(name: str) -> str:
    """What a value is called in generated code. Other things there have neither the name of an op of torch's
    nor one that ends in an underscore; ops of others may be called anything."""
    kind = re.sub(r"_\d+$", "", name)
    known = kind in _PORTS or hasattr(torch.ops.aten, kind.removesuffix("_"))
    return name if known and not keyword.iskeyword(name) else f"{name}_"


class _Body:
    def __init__(
        self, program: Program, script: Script, places: list[str], keep_places: bool, foreign: bool
    ) -> None:
        self.program = program
        self.script = script
        self.space: Namespace = script.names
        self.names: dict[Value, str] = {}
        self.numbers: dict[Any, str] = {}  # by expression
        for port, place in zip(program.inputs, places, strict=True):
            if type(port.value) is Value:
                self.names.setdefault(port.value, place)
            elif type(port.value) is Number:
                self.numbers.setdefault(port.value.expr, place)
        self.places = places
        self.stay = set(self.names) if keep_places else set()
        self.over = {} if foreign else reused(program)
        self.below, self.early = (set[Op](), set[Op]()) if foreign else ops_below(program)

    def write(self) -> list[str]:
        ops, below = self.program.ops, self.below
        early = [op for op in ops if op in self.early]
        first = [op for op in ops if op in below]
        rest = [op for op in ops if op not in below and op not in self.early]
        dropped = self._last_uses([*early, *first, *rest])
        if not self.stay:
            self._drop(self._unused_places())
        self._ops(early, dropped)
        if first:
            with self._below_autograd():
                self._ops(first, dropped)
        self._ops(rest, dropped)
        return [self._argument(r) for r in self.program.results]

    @contextmanager
    def _below_autograd(self) -> Iterator[None]:
        """Lines that skip autograd; except that of dual numbers, which takes part even without grad mode."""
        autograd, views = self.space.name(AUTOGRAD, "AUTOGRAD"), self.space.name(VIEWS, "VIEWS")
        level = f"{self.space.name(forward_ad, 'forward_ad')}._current_level"
        call = self.space.name(hide, "hide")
        self.script.line(f"above = {level} < 0 and not {self.space.name(hides, 'hides')}({autograd})")
        self.script.line(f"if above: {call}({autograd}, True); {call}({views}, True)")
        with self.script.block("try:"):
            yield
        with self.script.block("finally:"):
            self.script.line(f"if above: {call}({autograd}, False); {call}({views}, False)")

    def _ops(self, ops: list[Op], dropped: dict[Op, list[Value]]) -> None:
        for op in ops:
            self._op(op)
            self._drop([self.names[v] for v in dropped.get(op, ()) if v not in self.stay])

    def _drop(self, names: list[str]) -> None:
        if names:
            self.script.line(f"del {', '.join(names)}")

    def _unused_places(self) -> list[str]:
        """Where tensors are given that no op looks at, or that are given twice."""
        ports = zip(self.program.inputs, self.places, strict=True)
        given = [(p.value, place) for p, place in ports if type(p.value) is Value]
        return [place for v, place in given if v not in self.used or self.names[v] != place]

    def _op(self, op: Op) -> None:
        name = local_name(op.name)
        self.script.line(f"{name} = {self._call(op)}")
        if type(op.out) is Value:
            self.names[op.out] = name
        elif type(op.out) is Number:
            self.numbers.setdefault(op.out.expr, name)
        elif type(op.out) is tuple:
            for k, v in enumerate(op.out):
                if type(v) is Value and v in self.used:
                    self.names[v] = local_name(v.name)
                    self.script.line(f"{self.names[v]} = {name}[{k}]")
            self.script.line(f"del {name}")

    def _last_uses(self, ops: list[Op]) -> dict[Op, list[Value]]:
        """After which op each value can be dropped."""
        seen = {v for v in self.program.results if type(v) is Value}
        dropped: dict[Op, list[Value]] = {}
        for op in reversed(ops):
            for v in op.uses:
                if v not in seen:
                    seen.add(v)
                    dropped.setdefault(op, []).append(v)
            if type(op.out) is Value and op.out not in seen:
                dropped.setdefault(op, []).append(op.out)
        self.used = seen
        return dropped

    def _call(self, op: Op) -> str:
        over = self.over.get(op)
        op = with_constant(op)
        function, hint = callee(op.target, op.args)
        args = [self._argument(a) for a in op.args]
        if over is not None:
            function, k = over
            hint = function.__name__
            args.insert(0, args.pop(k))
        if op.target is _SUM and type(dims := op.args[1]) in (list, tuple) and len(dims) == 1:
            args[1] = self._argument(dims[0])  # one number is read faster than a list of one
        if op.target is _AS_STRIDED_SCATTER:
            args[0] += ".detach()"  # its kernel refuses what requires grad, even without grad mode
        args += [f"{k}={self._argument(v)}" for k, v in op.kwargs.items()]
        return f"{self.space.name(function, f'f_{hint}')}({', '.join(args)})"

    def _argument(self, value: Any) -> str:
        kind = type(value)
        if kind is Value:
            return self.names[value]
        if kind is Number:
            return self._number(value)
        if isinstance(value, list | tuple) and _is_open(value):
            inside = ", ".join(map(self._argument, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list | tuple):
            value = list(value) if isinstance(value, list) else tuple(value)
        if isinstance(value, Tensor):
            return self.space.name(value, "constant")
        return self.space.literal(value)

    def _number(self, value: Number) -> str:
        known = self.numbers.get(value.expr)
        if known is not None:
            return known
        self.space.values.update(MODULES)
        symbols = {s: sympy.Symbol(self.numbers[s], **s.assumptions0) for s in value.expr.free_symbols}
        return f"({python_text(value.expr.xreplace(symbols))})"


def _is_open(value: Any) -> bool:
    """Does this hold a value, or a number?"""
    if type(value) is Value or type(value) is Number:
        return True
    return isinstance(value, list | tuple) and any(_is_open(v) for v in value)

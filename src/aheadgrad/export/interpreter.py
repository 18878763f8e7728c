"""Runs a program op by op: the reference for whoever writes another runner.

A value is forgotten after its last use. Numbers that the program reads or computes are plain Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Value, map_leaves
from aheadgrad.torchlayer.symbols import MODULES, Number, python_text


class Interpreter:
    """`Interpreter(program)(inputs) -> results`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._texts: dict[Any, Any] = {}
        self._last: dict[Value, int] = {}
        for i, op in enumerate(program.ops):
            self._last.update(dict.fromkeys((*op.uses, *op.values), i))
        self._last.update({v: len(program.ops) for v in program.results if type(v) is Value})

    def __call__(self, given: list[Any]) -> list[Any]:
        values: dict[Value, Any] = {}
        numbers: dict[str, Any] = {}
        for port, value in zip(self.program.inputs, given, strict=True):
            if type(port.value) is Value:
                values.setdefault(port.value, value)
            elif type(port.value) is Number:
                numbers[str(port.value.expr)] = value
        given.clear()

        def find(leaf: Any) -> Any:
            return values[leaf] if type(leaf) is Value else self.number(leaf, numbers)

        for i, op in enumerate(self.program.ops):
            out = op.target(*map_leaves(op.args, find), **map_leaves(op.kwargs, find))
            self._keep(op, out, values, numbers)
            for v in {*op.uses, *op.values}:
                if self._last[v] == i:
                    values.pop(v, None)
        return [map_leaves(r, find) for r in self.program.results]

    def _keep(self, op: Op, out: Any, values: dict[Value, Any], numbers: dict[str, Any]) -> None:
        parts = out if type(op.out) is tuple else (out,)
        for value, part in zip(op.outs, parts, strict=True):
            if type(value) is Value:
                values[value] = part
            elif type(value) is Number:
                numbers[str(value.expr)] = part

    def number(self, number: Number, numbers: dict[str, Any]) -> Any:
        """What an expression is, given its symbols."""
        text = str(number.expr)
        if text in numbers:
            return numbers[text]
        if number.expr not in self._texts:
            self._texts[number.expr] = compile(python_text(number.expr), "<size>", "eval")
        return eval(self._texts[number.expr], dict(MODULES), numbers)


Call = Callable[[list[Any]], list[Any]]

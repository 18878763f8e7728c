"""The eager backend: the graph as straight-line Python.

Arguments arrive in a list that the function empties, and each value is dropped after its last
use, so memory is freed as early as in eager.
"""

from __future__ import annotations

import functools
import keyword
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from aheadgrad.emit.calls import callee
from aheadgrad.emit.script import Namespace, Script
from aheadgrad.program.program import Program

_AS_STRIDED_SCATTER = torch.ops.aten.as_strided_scatter.default

Boxed = Callable[[list[Any]], list[Any]]


def compile_eager(program: Program) -> Boxed:
    """A boxed function; `function.inline` lets callers that generate code take its lines instead."""
    script = Script(program.role.replace(" ", "_"))
    places = [_local_name(n) for n in program.placeholders]
    if places:
        script.line(f"{', '.join(places)}, = args")
        script.line("args.clear()")
    results = write_body(program, script, places)
    script.line(f"return [{', '.join(results)}]")
    function, source = script.function("args")
    function.source = source  # type: ignore[attr-defined]
    function.inline = functools.partial(write_body, program, keep_places=True)  # type: ignore[attr-defined]
    return function


def write_body(
    program: Program, script: Script, places: list[str], *, keep_places: bool = False
) -> list[str]:
    """Writes the program's lines on the given local names; returns expressions for its results."""
    nodes = list(program.graph.nodes)
    names = {n: _local_name(n) for n in nodes}
    names.update(zip(program.placeholders, places, strict=True))
    last_use = _last_uses(nodes)
    for node in nodes:
        if node.op == "call_function":
            script.line(f"{names[node]} = {_call(node, names, script.names)}")
        elif node.op == "get_attr":
            script.line(
                f"{names[node]} = {script.names.name(program.constants[str(node.target)], 'constant')}"
            )
        if node.op == "output":
            continue
        dead = [n for n in last_use.get(node, ()) if not (keep_places and n.op == "placeholder")]
        if dead:
            script.line(f"del {', '.join(names[n] for n in dead)}")
    return [_argument(r, names, script.names) for r in program.results]


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """After which node each value can be dropped."""
    seen: set[fx.Node] = set()
    dropped: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                dropped.setdefault(node, []).append(used)
        if node not in seen and node.op == "call_function":
            dropped.setdefault(node, []).append(node)
    return dropped


def _local_name(node: fx.Node) -> str:
    return f"{node.name}_" if keyword.iskeyword(node.name) or node.name == "args" else node.name


def _call(node: fx.Node, names: dict[fx.Node, str], space: Namespace) -> str:
    if node.target is operator.getitem:
        return f"{names[node.args[0]]}[{_argument(node.args[1], names, space)}]"  # type: ignore[index]
    function, hint = callee(node.target)
    args = [_argument(a, names, space) for a in node.args]
    if node.target is _AS_STRIDED_SCATTER:
        args[0] += ".detach()"  # its kernel refuses what requires grad, even without grad mode
    args += [f"{k}={_argument(v, names, space)}" for k, v in node.kwargs.items()]
    return f"{space.name(function, f'f_{hint}')}({', '.join(args)})"


def _argument(value: Any, names: dict[fx.Node, str], space: Namespace) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple) and _has_node(value):
        inside = ", ".join(_argument(v, names, space) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_argument(v, names, space)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        value = list(value) if isinstance(value, list) else tuple(value)
    return space.literal(value)


def _has_node(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return True
    return isinstance(value, list | tuple) and any(_has_node(v) for v in value)

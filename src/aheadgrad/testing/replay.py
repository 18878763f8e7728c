"""The same program called again in other ways: other shapes, `requires_grad`, aliasing, dtypes, grad mode.

A variant of a program has the same function and other inputs, written as text like the program's own:

    x1 = torch.tensor([[0.31, -1.2], [0.5, 1.9], [0.31, -1.2]])       # one row more

``variants(program)`` gives them in the order in which one compiled callable is called with them: each
is followed by something else, and the program's own inputs come again in between.
"""

from __future__ import annotations

import random
from ast import literal_eval
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from aheadgrad.testing.programs import Program
from aheadgrad.testing.runs import Around

_DATA = "torch.tensor("
_GRAD = ", requires_grad=True"


@dataclass(frozen=True)
class Variant:
    """Another way to call a program: its inputs, and what is around the call."""

    name: str
    program: Program
    around: Around = nullcontext


def in_parts(line: str) -> tuple[str, str, str]:
    """`x = torch.tensor(`, the numbers, and the rest; no numbers where there are none."""
    start = line.find(_DATA)
    if start < 0:
        return line, "", ""
    start, depth = start + len(_DATA), 0
    for end in range(start, len(line)):
        depth += {"[": 1, "]": -1}.get(line[end], 0)
        if depth == 0 and line[end] in "],)":
            end += line[end] == "]"
            return line[:start], line[start:end], line[end:]
    return line, "", ""


def changed_data(program: Program, change: Callable[[Any], Any]) -> Program:
    """The same program with other numbers in its set-up."""

    def rewritten(line: str) -> str:
        head, data, rest = in_parts(line)
        return f"{head}{change(literal_eval(data))!r}{rest}" if data else line

    return replace(program, setup=tuple(map(rewritten, program.setup)))


def longer(data: Any) -> Any:
    return [*data, *data[:1]] if isinstance(data, list) and data else data


def shorter(data: Any) -> Any:
    return data[:1] if isinstance(data, list) and data else data


def wider(data: Any) -> Any:
    if isinstance(data, list) and data and isinstance(data[0], list):
        return [wider(part) for part in data]
    return longer(data)


def with_lines(program: Program, change: Callable[[str], str]) -> Program:
    """The same program with a changed set-up; leaves and watched tensors are found again."""
    setup = tuple(map(change, program.setup))
    values: dict[str, Any] = {"torch": torch}
    for line in setup:
        exec(line, values)
    made = [name for name in values if name.startswith("x")]
    leaves = tuple(n for n in made if values[n].is_leaf and values[n].requires_grad)
    watched = tuple(n for n in made if n not in leaves and n not in program.args)
    return replace(program, setup=setup, leaves=leaves, watched=watched)


def without_grad(line: str) -> str:
    return line.replace(_GRAD, "").replace(".requires_grad_()", "")


def with_grad(line: str) -> str:
    if "torch.tensor(" not in line or "requires_grad" in line:
        return line
    return f"{line}.requires_grad_()" if line.endswith(".detach()") else f"{line[:-1]}{_GRAD})"


def in_double(line: str) -> str:
    head, data, rest = in_parts(line)
    return f"{head}{data}, dtype=torch.float64{rest}" if data and "dtype=" not in rest else line


def aliased(program: Program, rng: random.Random) -> list[Program]:
    """One argument takes the place of another: the tensor itself, or a view of it."""
    tensors = [i for i, arg in enumerate(program.args) if arg.startswith("x")]
    if len(tensors) < 2:
        return []
    a, b = rng.sample(tensors, 2)
    same = list(program.args)
    same[b] = same[a]
    view = list(program.args)
    view[b] = "x_view"
    line = f"x_view = {program.args[a]}.view_as({program.args[a]})"
    return [
        replace(program, args=tuple(same)),
        replace(program, args=tuple(view), setup=(*program.setup, line)),
    ]


def variants(program: Program) -> list[Variant]:
    """Ways to call one compiled callable, one after the other."""
    rng = random.Random(f"replay {program.seed}")
    found = [Variant("again", program)]

    def add(name: str, make: Callable[[], Program], around: Around = nullcontext) -> None:
        try:
            other = make()
            other.make_inputs()
        except Exception:  # set-up lines that do not go with the change
            return
        found.append(Variant(name, other, around))

    add("longer", lambda: changed_data(program, longer))
    add("longer still", lambda: changed_data(program, lambda d: longer(longer(d))))
    add("no grad mode", lambda: program, torch.no_grad)
    add("no tensor requires grad", lambda: with_lines(program, without_grad))
    add("all require grad", lambda: with_lines(program, with_grad))
    for other in aliased(program, rng):
        add("aliased", lambda other=other: other)  # type: ignore[misc]
        add("aliased, longer", lambda other=other: changed_data(other, longer))  # type: ignore[misc]
    add("wider", lambda: changed_data(program, wider))
    add("shorter", lambda: changed_data(program, shorter))
    add("double", lambda: with_lines(program, in_double))
    add("longer without grad mode", lambda: changed_data(program, longer), torch.no_grad)
    rest = found[1:]
    rng.shuffle(rest)
    return [found[0], *rest, found[0]]

"""From a failing program to a small failing program.

Greedy: try smaller programs, most promising first; whenever one still fails, go on from there, until
none does. Candidates come from removing runs of lines (a removed ``v2 = v1.sin()`` may leave ``v1`` in
its place), taking lines out of blocks, removing results, removing arguments, and making arguments
simpler. A candidate that cannot even be built, or whose predicate raises, counts as not failing.

    small = shrink(program, lambda p: bool(compare(p.fn, compile(p.fn, backend="eager"), p.make_inputs)))
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from aheadgrad.testing.programs import Program, Result, Step, simplified
from aheadgrad.testing.scene import names_in

Predicate = Callable[[Program], bool]


def shrink(program: Program, fails: Predicate, *, seconds: float = 60.0) -> Program:
    """The smallest program found within the time for which ``fails(program)`` is true."""
    deadline = time.monotonic() + seconds
    tried = {str(program)}
    progress = True
    while progress:
        progress = False
        for candidate in candidates(program):
            if time.monotonic() > deadline:
                return program
            text = str(candidate)
            if text in tried:
                continue
            tried.add(text)
            if still_fails(candidate, fails):
                program, progress = candidate, True
                break
    return program


def still_fails(candidate: Program, fails: Predicate) -> bool:
    try:
        return fails(candidate)
    except Exception:
        return False


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are a little smaller, the boldest steps first."""
    yield from smaller_results(program)
    yield from shorter_bodies(program)
    yield from fewer_arguments(program)
    yield from fewer_blocks(program)
    yield from simpler_arguments(program)
    yield from fewer_watched(program)


def smaller_results(program: Program) -> Iterator[Program]:
    for result in parts_of(program.result):
        yield replace(program, result=result)


def parts_of(result: Result) -> Iterator[Result]:
    """A container without its shell, without one item, or with one item made smaller."""
    if isinstance(result, dict):
        yield tuple(result.values())
        for key, value in result.items():
            yield value
            yield {other: result[other] for other in result if other != key}
            for part in parts_of(value):
                yield {**result, key: part}
    elif isinstance(result, (list, tuple)):
        items = list(result)
        yield from items
        if isinstance(result, list):
            yield tuple(items)
        for i, item in enumerate(items):
            yield type(result)(items[:i] + items[i + 1 :])
            for part in parts_of(item):
                yield type(result)([*items[:i], part, *items[i + 1 :]])
    else:
        inner = re.match(r"\w+", str(result))
        if inner and inner.group() != result and inner.group() not in ("None", "torch"):
            yield inner.group()


def shorter_bodies(program: Program) -> Iterator[Program]:
    """Remove runs of lines, long runs first; then single lines with their value replaced by an operand."""
    body, size = program.body, len(program.body)
    length = size
    while length:
        for start in range(0, size - length + 1):
            yield replace(program, body=body[:start] + body[start + length :])
        length //= 2
    for position, step in enumerate(body):
        targets, assigned, expression = step.text.partition(" = ")
        if not assigned or not re.fullmatch(r"v\d+", targets):
            continue
        defined = set(program.params) | {f"v{n}" for n in range(1, 99)}
        for operand in sorted(names_in(expression) & defined):
            shorter = replace(program, body=body[:position] + body[position + 1 :])
            yield renamed(shorter, targets, operand)


def renamed(program: Program, old: str, new: str) -> Program:
    def change(text: str) -> str:
        return re.sub(rf"\b{old}\b", new, text)

    def change_result(result: Result) -> Result:
        if isinstance(result, dict):
            return {key: change_result(value) for key, value in result.items()}
        if isinstance(result, (list, tuple)):
            return type(result)(change_result(item) for item in result)
        return change(str(result))

    body = tuple(Step(change(step.text), step.blocks) for step in program.body)
    return replace(program, body=body, result=change_result(program.result))


def fewer_arguments(program: Program) -> Iterator[Program]:
    """Remove parameters that the program no longer mentions, or pass one tensor instead of another."""
    mentioned = names_in(program.source.partition("\n")[2])
    for i, param in enumerate(program.params):
        if param not in mentioned:
            params, args = program.params, program.args
            yield simplified(program, params=params[:i] + params[i + 1 :], args=args[:i] + args[i + 1 :])
    for param in program.params:
        for other in program.params:
            if param != other and param in mentioned:
                yield renamed(program, param, other)


def fewer_blocks(program: Program) -> Iterator[Program]:
    body = program.body
    for i, step in enumerate(body):
        for depth in range(len(step.blocks)):
            blocks = step.blocks[:depth] + step.blocks[depth + 1 :]
            yield replace(program, body=(*body[:i], Step(step.text, blocks), *body[i + 1 :]))


def simpler_arguments(program: Program) -> Iterator[Program]:
    """Pass what a line of the set-up is made from instead of what it makes; drop flags and dtypes."""
    for i, line in enumerate(program.setup):
        name, _, expression = line.partition(" = ")
        for source in sorted(
            names_in(expression) & {earlier.partition(" = ")[0] for earlier in program.setup[:i]}
        ):
            args = tuple(source if arg == name else arg for arg in program.args)
            setup = [re.sub(rf"\b{name}\b", source, later) for later in program.setup[i + 1 :]]
            yield simplified(program, setup=(*program.setup[:i], *setup), args=args)
        for extra in (", requires_grad=True", ", dtype=torch.float64", ".requires_grad_()"):
            if extra in line:
                setup = [
                    line.replace(extra, "") if j == i else other for j, other in enumerate(program.setup)
                ]
                yield simplified(program, setup=tuple(setup))


def fewer_watched(program: Program) -> Iterator[Program]:
    for name in program.watched:
        yield replace(program, watched=tuple(other for other in program.watched if other != name))

"""How much memory a split takes at its worst moment, by a look at its programs.

Counted is what the call itself makes: what it saves, results, and what lies between; not its inputs. A value
is freed after its last use, and views are their base.
"""

from __future__ import annotations

from collections.abc import Iterable

from aheadgrad.program.program import Program
from aheadgrad.program.values import Value

_NEARLY = 0.95


def peak_of_forward(program: Program) -> int:
    return _peak(program, {})


def peak_of_backward(program: Program, made: Iterable[Value]) -> int:
    """`made` are those among its inputs that take memory: no inputs of the call."""
    return _peak(program, {v: v.type.bytes for v in made})


def read_by_the_peak(program: Program, made: Iterable[Value]) -> set[Value]:
    """Those among its inputs that a backward does not need any more once it has taken the most memory, or
    nearly so for the last time."""
    held = {v: v.type.bytes for v in made}
    levels, last = _levels(program, held)
    near = _NEARLY * max(levels, default=0)
    worst = max((at for at, level in enumerate(levels) if level >= near), default=0)
    return {v for v in held if last.get(v, 0) <= worst}


def _peak(program: Program, held: dict[Value, int]) -> int:
    return max([sum(held.values()), *_levels(program, held)[0]])


def _levels(program: Program, held: dict[Value, int]) -> tuple[list[int], dict[Value, int]]:
    """The bytes that are held at each op, and by value the number of the last op that reads it."""
    roots: dict[Value, Value] = {}
    last: dict[Value, int] = {}
    for at, op in enumerate(program.ops):
        viewed = op.viewed
        for v in op.values:
            roots[v] = v if viewed is None else roots.get(viewed, viewed)
        for v in op.uses:
            last[roots.get(v, v)] = at
    for v in program.results:
        if type(v) is Value:
            last[roots.get(v, v)] = len(program.ops)
    now = sum(held.values())
    levels: list[int] = []
    sizes = dict(held)
    ending: dict[int, list[Value]] = {}
    for v, at in last.items():
        ending.setdefault(at, []).append(v)
    for at, op in enumerate(program.ops):
        if op.viewed is None:
            for v in op.values:
                sizes[v] = v.type.bytes
                now += sizes[v]
                if v not in last:
                    ending.setdefault(at, []).append(v)
        levels.append(now)
        for v in ending.get(at, ()):
            now -= sizes.pop(v, 0)
    return levels, last

"""The compile stage: programs become executables."""

from __future__ import annotations

from dataclasses import dataclass

from aheadgrad.backends.eager import Boxed
from aheadgrad.backends.registry import compile_program
from aheadgrad.options import Options
from aheadgrad.partition.split import SplitPrograms


@dataclass(eq=False)
class Executables:
    forward: Boxed
    backwards: list[Boxed | None]


def compile_split(split: SplitPrograms, options: Options) -> Executables:
    forward = compile_program(options.backend, split.forward)
    backwards = [None if p is None else compile_program(options.backend, p) for p in split.backwards]
    return Executables(forward, backwards)

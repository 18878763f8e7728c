"""The eager backend: the program as straight-line Python.

Arguments arrive in a list that the function empties, and each value is dropped after its last
use, so memory is freed as early as in eager.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.contract import Boxed, Executable, Later, Request
from aheadgrad.emit.body import local_name, write_body
from aheadgrad.emit.script import Script
from aheadgrad.program.program import Program
from aheadgrad.program.shorter import shortened


def compile_eager(request: Request | Program, *, foreign: bool = False) -> Executable:
    """An executable whose lines callers that generate code can take; others get a function of its own.

    `foreign`: it will be given tensor subclasses that the recording knows nothing of.
    """
    program = request.program if isinstance(request, Request) else request
    if program.role == "backward" and not program.parts_first:
        program = shortened(program)
    inline = functools.partial(write_body, program, foreign=foreign)
    return Executable(Later(functools.partial(_function, program, foreign)), inline=inline)


def _function(program: Program, foreign: bool) -> Boxed:
    script = Script(program.role.replace(" ", "_"))
    places = [local_name(p.name) for p in program.inputs]
    if places:
        script.line(f"{', '.join(places)}, = args")
        script.line("args.clear()")
    results = write_body(program, script, places, foreign=foreign)
    script.line(f"return [{', '.join(results)}]")
    return script.function("args")[0]


def op_by_op(request: Request) -> Executable:
    """For whoever is beside another backend: what comes in another layout than recorded is copied first."""
    made = compile_eager(request.program)
    inputs = enumerate(request.program.inputs)
    others = [(i, p.value.type.stride) for i, p in inputs if p.value in request.layouts]
    if not others:
        return made

    def run(args: list[Any]) -> list[Any]:
        for i, strides in others:
            args[i] = laid_out(args[i], strides)
        return made.call(args)

    return Executable(run)


def laid_out(t: Tensor, strides: tuple[Any, ...]) -> Tensor:
    """A copy with these strides; a dense one where they are symbolic."""
    if any(type(s) is not int for s in strides):
        return t.contiguous()
    return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)

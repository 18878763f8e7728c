"""The eager backend: the program as straight-line Python.

Arguments arrive in a list that the function empties, and each value is dropped after its last
use, so memory is freed as early as in eager.
"""

from __future__ import annotations

import functools

from aheadgrad.backends.contract import Boxed, Executable, Later, Request
from aheadgrad.emit.body import local_name, write_body
from aheadgrad.emit.script import Script
from aheadgrad.program.program import Program
from aheadgrad.program.shorter import shortened


def compile_eager(request: Request | Program) -> Executable:
    """An executable whose lines callers that generate code can take; others get a function of its own."""
    program = request.program if isinstance(request, Request) else request
    if program.role == "backward" and not program.parts_first:
        program = shortened(program)
    inline = functools.partial(write_body, program)
    return Executable(Later(functools.partial(_function, program)), inline=inline)


def _function(program: Program) -> Boxed:
    script = Script(program.role.replace(" ", "_"))
    places = [local_name(p.name) for p in program.inputs]
    if places:
        script.line(f"{', '.join(places)}, = args")
        script.line("args.clear()")
    results = write_body(program, script, places)
    script.line(f"return [{', '.join(results)}]")
    return script.function("args")[0]

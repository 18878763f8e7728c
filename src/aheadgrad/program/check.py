"""The checker beside the structure: is this program well formed and functional?

check(program)      # raises InvalidProgram, with the ops around the fault
"""

from __future__ import annotations

from aheadgrad.errors import InvalidProgram
from aheadgrad.program.program import Program
from aheadgrad.program.show import op_line
from aheadgrad.program.slots import UpdatedInput
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import is_mutable, is_random, schema_of

# Writes that may stand in a program: an input's own update, kept inside the graph on purpose.
_ALLOWED_WRITES = {"aten::copy_", "aten::set_", "inductor::resize_storage_bytes_"}


def check(program: Program) -> Program:
    """Returns the program; raises InvalidProgram when it breaks a rule."""
    seen = {p.value for p in program.inputs if type(p.value) is Value}
    for op in program.ops:
        for used in op.uses:
            if used not in seen:
                _fail(program, op, f"uses {used} before it is made")
        seen.update(op.values)
        if is_mutable(op.target) and not is_random(op.target):
            name = schema_of(op.target).name
            if name not in _ALLOWED_WRITES:
                _fail(program, op, f"{name} changes its argument; programs are functional")
    for value in program.results:
        if type(value) is Value and value not in seen:
            _fail(program, None, f"{value} leaves, and is never made")
    if program.role == "backward" and program.signature.outputs_of(UpdatedInput):
        _fail(program, None, "a backward does not update inputs")
    names = [p.name for p in program.inputs]
    if len(set(names)) < len(names):
        _fail(program, None, f"two inputs have one name: {', '.join(names)}")
    return program


def _fail(program: Program, op: Op | None, why: str) -> None:
    at = program.ops.index(op) if op is not None else len(program.ops) - 1
    around = "\n".join(
        f"{'>>' if o is op else '  '} {op_line(o)}" for o in program.ops[max(0, at - 5) : at + 5]
    )
    raise InvalidProgram(f"The {program.role} program is not well formed: {why}.\n{around}")

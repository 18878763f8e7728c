"""From the entry's order of inputs to the forward program's.

The entry takes its tensors first, then symbolic numbers. The program has each number where the
caller gave it, and in the drop-in's graphs constants (`None`, 2) as well.
"""

from __future__ import annotations

from aheadgrad.backends.contract import Executable
from aheadgrad.emit.script import Script
from aheadgrad.joint.level import Joint
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.symbols import Number


def arranged(joint: Joint, forward: Executable) -> Executable:
    """The forward, taking its inputs in the entry's order."""
    if not joint.has_scalars:
        return forward
    tensors = {e.value: f"p{i}" for i, e in enumerate(joint.entrances)}
    script = Script("arranged")
    numbers = [f"n{k}" for k in range(len(joint.numbers))]
    unused = iter(numbers)
    program: list[str] = []
    for _, value in joint.inputs:
        if type(value) is Value:
            program.append(tensors[value])
        elif type(value) is Number:
            program.append(next(unused))
        else:
            program.append(script.names.literal(value))
    given = [*tensors.values(), *numbers]
    if given:
        script.line(f"{', '.join(given)}, = args")
        script.line("args.clear()")
    run = script.names.name(forward.call, "forward")
    script.line(f"return {run}([{', '.join(program)}])")
    return Executable(script.function("args")[0])

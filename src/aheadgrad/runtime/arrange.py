"""From the entry's order of inputs to the forward program's.

The entry takes its tensors first, then symbolic numbers. The program has each number where the
caller gave it, and in the drop-in's graphs constants (`None`, 2) as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aheadgrad.emit.script import Script
from aheadgrad.torchlayer.symbols import is_symbolic

if TYPE_CHECKING:
    from aheadgrad.backends.eager import Boxed
    from aheadgrad.recording.captured import Captured


def arranged(captured: Captured, forward: Boxed) -> Boxed:
    """The forward, taking its inputs in the entry's order."""
    if not captured.scalars:
        return forward
    tensors = {id(e.value): f"p{i}" for i, e in enumerate(captured.session.entrances)}
    script = Script("arranged")
    numbers = [f"n{k}" for k in range(len(captured.numbers))]
    unused = iter(numbers)
    program: list[str] = []
    for _, value in captured.inputs:
        known = tensors.get(id(value))
        if known is not None:
            program.append(known)
        elif is_symbolic(value):
            program.append(next(unused))
        else:
            program.append(script.names.literal(value))
    given = [*tensors.values(), *numbers]
    if given:
        script.line(f"{', '.join(given)}, = args")
        script.line("args.clear()")
    run = script.names.name(forward, "forward")
    script.line(f"return {run}([{', '.join(program)}])")
    function: Any = script.function("args")[0]
    boxed: Boxed = function
    return boxed

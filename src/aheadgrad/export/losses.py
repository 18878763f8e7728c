"""Which output is the loss, and the joint program with its gradients alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aheadgrad.errors import InvalidOption
from aheadgrad.export.recorded import Recorded
from aheadgrad.export.trees import Tree, paths
from aheadgrad.joint.level import Joint
from aheadgrad.joint.requests import Request
from aheadgrad.program.slots import UserOutput
from aheadgrad.program.values import Value
from aheadgrad.recording.door import LiveDoor


def loss_index(loss: int | str, returns: Tree) -> int:
    """The number of the flat output that `loss` names."""
    written = list(paths(returns))
    if isinstance(loss, int) and not isinstance(loss, bool):
        if 0 <= loss < len(written):
            return loss
    else:
        spellings = (loss, f".{loss}", f"[{loss!r}]")
        fitting = [k for k, path in enumerate(written) if path in spellings]
        if len(fitting) == 1:
            return fitting[0]
    known = ", ".join(f"{k}: {path or 'the result itself'}" for k, path in enumerate(written))
    raise InvalidOption(f"loss={loss!r} is no output; choose a number or path of these: {known}.")


def of_loss(found: Recorded, slot: UserOutput) -> tuple[Joint, Value] | None:
    """The joint narrowed to the gradients of one output, and the output's value; None if it has none."""
    joint = found.joint
    for component in joint.components:
        for k, i in enumerate(component.exits):
            if joint.exits[i].slot != slot:
                continue
            value = joint.exits[i].value
            if len(component.exits) == 1:
                return _only(joint, component.number, joint.gradients[component.number]), value
            pattern = tuple(True if j == k else None for j in range(len(component.exits)))
            request = Request(component.number, pattern, joint.backward_autocast)
            further = LiveDoor(found.recording).more(request)
            return _only(joint, component.number, further.gradients, further.tape), value
    return None


def _only(joint: Joint, number: int, gradients: Any, tape: Any = None) -> Joint:
    if gradients is None:
        raise joint.failures[number]
    one = (joint.components[number],)
    return replace(joint, tape=tape or joint.tape, components=one, gradients=(gradients,))

"""Is what a file says sound, even if somebody wrote it by hand?

Ops are torch's own (or trusted), take what their schemas say, and use what was made before; nothing is so
large or so deep that to look through it would take for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from keyword import iskeyword
from typing import Any

from torch import Tensor

from aheadgrad.errors import ArtifactError
from aheadgrad.facts.facts import Reshape, Step
from aheadgrad.program.check import check
from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import OpOverload, is_view_op
from aheadgrad.torchlayer.named import RESHAPES
from aheadgrad.torchlayer.replay import Drawn, Replayed
from aheadgrad.torchlayer.schemas import is_trusted, misfit
from aheadgrad.torchlayer.symbols import Number

_DEEPEST, _LARGEST = 64, 1 << 24
_RESULTS = (Value, Number, int, float, bool, complex, str, type(None))
_RESHAPES = tuple(RESHAPES.values())


def check_extent(objects: Any) -> None:
    """Raises for objects that would be deep or large if what they share were written out."""
    known: list[tuple[int, int]] = []
    for row in objects:
        depth, size = _extent(row, known, 0)
        if depth > _DEEPEST or size > _LARGEST:
            raise ArtifactError(f"Object {len(known)} is nested too deeply, or too large.")
        known.append((depth + 1, size))


def _extent(data: Any, known: list[tuple[int, int]], level: int) -> tuple[int, int]:
    if type(data) is not list or level > _DEEPEST:
        return level, 1
    if len(data) == 1 and type(data[0]) is int:
        return known[data[0]] if 0 <= data[0] < len(known) else (0, 1)
    deepest, total = 0, 1
    for part in data:
        if type(part) is list:
            depth, size = _extent(part, known, level + 1)
            deepest, total = max(deepest, depth), total + size
    return deepest, total + len(data)


def check_trust(op: Any, namespaces: Collection[str]) -> None:
    if not is_trusted(op, namespaces):
        raise ArtifactError(
            f"The op {op} is not one of those that only compute. If you trust it, and who wrote the file, "
            f"load it with trust=({str(op).partition('.')[0]!r},)."
        )


def check_sound(value: Any) -> None:
    """What there is to check of one object, beyond what is checked of every one that is read."""
    if type(value) is Op:
        _check_op(value)
    elif type(value) is Program:
        _check_program(value)
    elif type(value) is Step and not (is_view_op(value.target) or _is_reshape(value.target)):
        raise ArtifactError(f"{str(value.target)[:80]} makes no view.")
    elif type(value) is Reshape and not _is_reshape(value.function):
        raise ArtifactError(f"{str(value.function)[:80]} changes no shape in place.")


def _is_reshape(function: Any) -> bool:
    return any(function is known for known in _RESHAPES)


def _is_tensor(value: Any) -> bool:
    return type(value) is Value or isinstance(value, Tensor)


def _check_op(op: Op) -> None:
    target, args, out = op.target, op.args, op.out
    if isinstance(target, Drawn | Replayed):
        state, rest = op.outs[:1] if isinstance(target, Drawn) else args[:1], op.outs[1:]
        if len(state) != 1 or type(state[0]) is not Value:
            raise ArtifactError(f"{op.name} knows no state of a generator.")
        if isinstance(target, Drawn):
            out = rest if len(rest) > 1 else rest[0] if rest else None
        else:
            args = args[1:]
        target = target.op
    if not all(type(v) in (Value, Number, int, float, bool, type(None)) for v in op.outs):
        raise ArtifactError(f"The results of {op.name} are neither tensors nor numbers.")
    if type(out) is tuple and any(type(v) is Value and v.part not in (k, None) for k, v in enumerate(out)):
        raise ArtifactError(f"The results of {op.name} are not in order.")
    if isinstance(target, OpOverload):
        wrong = misfit(target, args, op.kwargs, out, _is_tensor)
        if wrong is not None:
            raise ArtifactError(f"{op.name} does not call {target} as it is to be called: {wrong}.")


def _check_program(program: Program) -> None:
    function = program.role.replace(" ", "_")  # in generated code
    if not function.isidentifier() or iskeyword(function):
        raise ArtifactError(f"{program.role[:80]!r} cannot be what a program is for.")
    if not all(type(v) in _RESULTS for _, v in program.outputs):
        raise ArtifactError(f"The results of the {program.role} program are neither tensors nor numbers.")
    check(program)
    made = [v for op in program.ops for v in op.values]
    given = {p.value for p in program.inputs if type(p.value) is Value}
    if len(set(made)) < len(made) or not given.isdisjoint(made):
        raise ArtifactError(f"The {program.role} program makes a value twice.")

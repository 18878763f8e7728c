"""What has to be true of an object beyond the types of its fields.

Names of values may stand in generated code, so they are identifiers; types of tensors make sense.
"""

from __future__ import annotations

from collections.abc import Callable
from keyword import iskeyword
from typing import Any

import torch

from aheadgrad.errors import ArtifactError
from aheadgrad.joint.level import Target
from aheadgrad.partition.saved import SavedSet, SavedValue
from aheadgrad.program.values import FreshCopy, Port, TensorType, Value, Write
from aheadgrad.torchlayer.dispatch import OpOverload, is_random
from aheadgrad.torchlayer.expressions import is_expression
from aheadgrad.torchlayer.replay import Drawn, Replayed
from aheadgrad.torchlayer.subclasses import Bundle, Form, is_foreign_class
from aheadgrad.torchlayer.symbols import Number

_FAR = 1 << 62


def identifier(name: Any) -> None:
    if type(name) is not str or not name.isidentifier() or iskeyword(name):
        raise ArtifactError(f"{str(name)[:80]!r} cannot be the name of a value.")


def _value(value: Value) -> None:
    if value.name:
        identifier(value.name)


def _named(value: Any) -> None:
    identifier(value.name)


def _tensor_type(looks: TensorType) -> None:
    strided = looks.layout is torch.strided
    fits = len(looks.stride) == len(looks.size) if strided else not looks.stride
    if not fits or not all(map(_is_size, looks.numbers)):
        shown = f"sizes {str(looks.size)[:80]}, strides {str(looks.stride)[:80]}"
        raise ArtifactError(f"There is no tensor like this: {shown}, offset {str(looks.offset)[:80]}.")


def _is_size(number: Any) -> bool:
    if type(number) is Number:
        return number.kind is int
    return type(number) is int and 0 <= number < _FAR


def _number(number: Number) -> None:
    known = number.hint is None or isinstance(number.hint, int | float)
    if not (is_expression(number.expr) and number.kind in (int, float, bool) and known):
        raise ArtifactError(f"{str(number)[:80]} is no number.")


def _saved(saved: SavedSet) -> None:
    for name, number in saved.sizes:
        identifier(name)
        if type(number) is not Number:
            raise ArtifactError(f"The saved size {name} is no symbolic number.")


def _target(target: Target) -> None:
    for part in target.name.split(".") if target.name else ():
        identifier(part)


def _form(form: Form) -> None:
    for name in form.names:
        identifier(name)
    if not is_foreign_class(form.kind) or len(form.names) != len(form.inner):
        raise ArtifactError(f"A {form.kind} is not put together from {', '.join(form.names)}.")


def _bundle(bundle: Bundle) -> None:
    if type(bundle.parts) is not tuple or len(bundle.parts) != len(bundle.form.plain):
        raise ArtifactError(f"A {bundle.form.kind} has {len(bundle.form.plain)} parts.")


def _random(target: Drawn | Replayed) -> None:
    if not is_random(target.op):
        raise ArtifactError(f"{str(target.op)[:80]} draws no random numbers.")


def _overload(value: FreshCopy | Write) -> None:
    if not isinstance(value.target, OpOverload):
        raise ArtifactError(f"{str(value.target)[:80]} is no op.")


def _copy(copy: FreshCopy) -> None:
    identifier(copy.name)
    _overload(copy)


CHECKS: dict[type, Callable[[Any], None]] = {
    Value: _value,
    TensorType: _tensor_type,
    Number: _number,
    Port: _named,
    SavedValue: _named,
    SavedSet: _saved,
    Target: _target,
    Form: _form,
    Bundle: _bundle,
    Drawn: _random,
    Replayed: _random,
    FreshCopy: _copy,
    Write: _overload,
}

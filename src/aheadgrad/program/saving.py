"""Stages as bytes, and back: programs, tapes, levels, splits.

What is live is no part of them, so nothing of a recording is needed to load one again. Options lose what only
a process has (a backend or a partition function of the caller's own), ops what others noted beside them.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import fields, is_dataclass
from typing import Any

from aheadgrad.options import Options
from aheadgrad.program.program import Program
from aheadgrad.program.values import Op
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, OpOverload, op_named

_OURS = "aheadgrad."


def dumps(stage: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out).dump(stage)
    return out.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload | HigherOrderOperator):
            return op_named, (str(value),)
        if type(value) is Options:
            return _options, (value.one_node, value.dynamic, value.any_order)
        if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith(_OURS):
            return type(value), tuple(_field(value, f.name) for f in fields(value))  # not what is cached
        return NotImplemented


def _field(value: Any, name: str) -> Any:
    return None if name in ("meta", "made") and isinstance(value, Op | Program) else getattr(value, name)


def _options(one_node: bool, dynamic: bool | None, any_order: bool) -> Options:
    return Options(one_node=one_node, dynamic=dynamic, any_order=any_order)

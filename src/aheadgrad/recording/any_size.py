"""A derivative recorded for any size, although torch's C++ asks for numbers on the way.

It is given stand-ins (`torchlayer/stand_ins.py`). Where some were asked for, the derivative is recorded once
more with others; if the same comes out, it holds for any size. If not, it is recorded for the sizes at hand,
which become assumptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from aheadgrad.recording.records import Record
from aheadgrad.recording.session import Session
from aheadgrad.torchlayer.assumptions import Assumed
from aheadgrad.torchlayer.stand_ins import StandIns
from aheadgrad.torchlayer.symbols import expression, is_symbolic

T = TypeVar("T")


def for_any_size(session: Session, record: Callable[[], T]) -> T:
    recorder, trace = session.recorder, session.trace
    if session.mode.shape_env is None:
        return record()
    before, start, known = Assumed(session.mode), len(trace.records), recorder.stand_ins
    first = recorder.stand_ins = StandIns(0, known)
    recorder.asked_by_torch = True
    try:
        try:
            made = record()
        except Exception:
            if not first.given:
                raise
        else:
            if not first.given:
                return made
            if not before.changed and _same_with_others(session, record, start, first):
                recorder.stand_ins = first
                return made
    finally:
        recorder.asked_by_torch = False
        if not first.given:
            recorder.stand_ins = known
    before.restore()
    trace.rewind(start)
    recorder.stand_ins = known
    return record()


def _same_with_others(session: Session, record: Callable[[], Any], start: int, first: StandIns) -> bool:
    recorder, trace = session.recorder, session.trace
    before, middle, read_off = Assumed(session.mode), len(trace.records), trace.read_off
    recorder.stand_ins = StandIns(1, first)
    try:
        record()
        return not before.changed and _same(trace.records[start:middle], trace.records[middle:])
    except Exception:
        return False
    finally:
        trace.rewind(middle)
        trace.read_off = read_off
        if before.changed:
            before.restore()


def _same(one: list[Record], other: list[Record]) -> bool:
    """The same ops on the same values and numbers; tensors are matched as they appear."""
    matched: dict[int, int] = {}
    if len(one) != len(other):
        return False
    return all(
        a.target is b.target
        and _alike((a.args, a.kwargs), (b.args, b.kwargs), matched)
        and _alike(a.out, b.out, matched)
        for a, b in zip(one, other, strict=True)
    )


def _alike(a: Any, b: Any, matched: dict[int, int]) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return matched.setdefault(id(a), id(b)) == id(b)
    if is_symbolic(a) and is_symbolic(b):
        return bool(expression(a) == expression(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_alike(x, y, matched) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and _alike(list(a.values()), list(b.values()), matched)
    return a is b or bool(a == b) or (a != a and b != b)

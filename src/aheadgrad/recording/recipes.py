"""Recipes: how to make one alias from another at run time.

When the view ops that lead to the source are a prefix of those that lead to the target, the rest
is the recipe. Otherwise (the source's own sizes were changed in place since) the target's sizes
and strides are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import Recipe, Step
from aheadgrad.recording.geometry import geometry_of
from aheadgrad.recording.ledger import InPlace
from aheadgrad.recording.session import Session
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import TorchDispatchMode
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import is_foreign, parts_of


class _StepLog(TorchDispatchMode):
    """Writes down the view ops of one replay."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves the import of Dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        out = self.mode.dispatch(func, types, args, kwargs or {})
        self.calls.append((func, args, kwargs or {}, out))
        return out


def recipe(session: Session, source: Tensor, target: Tensor) -> Recipe:
    if is_foreign(target):
        return _recorded(session, source, target)
    old, new = functional.view_steps(source), functional.view_steps(target)
    if len(new) >= len(old) and all(map(functional.same_step, old, new)):
        steps = _steps(session, source, target, new[len(old) :])
        if steps is not None:
            return Recipe(steps)
    if source.dtype != target.dtype or source.is_conj() != target.is_conj():
        raise FallbackError("an output is a view through another dtype of a tensor whose sizes changed")
    return Recipe(geometry=session.ledger.final_geometry(target))


def _recorded(session: Session, source: Tensor, target: Tensor) -> Recipe:
    """The view ops that made one subclass from another, as the recorder noted them."""
    steps: list[Step] = []
    while target is not source:
        line = session.ledger.of(target)
        made = line.view
        if made is None:
            if _looks_like(target, source):
                break  # another tensor around the same parts (`.data`)
            raise FallbackError("an output shares memory with a tensor subclass in a way that is not a view")
        if made.source_geometry != geometry_of(made.source):
            raise FallbackError("an output is a view of a tensor subclass that changed its shape since")
        steps += map(_reshape_step, reversed(line.reshapes))
        steps.append(made.step)
        target = made.source
    return Recipe(tuple(reversed(steps)))


def _reshape_step(done: InPlace) -> Step:
    """A change of shape in place, made again in place: autograd tells it from a view."""
    call = done.call
    hidden = done.of.requires_grad and not call.with_grad
    return Step(call.function, call.args, tuple(call.kwargs.items()), None, hidden, in_place=True)


def _looks_like(a: Tensor, b: Tensor) -> bool:
    if functional.storage_key(a) != functional.storage_key(b) or type(a) is not type(b):
        return False
    pairs = zip([a, *parts_of(a)], [b, *parts_of(b)], strict=True)
    return all(geometry_of(x) == geometry_of(y) and x.dtype == y.dtype for x, y in pairs)


def _steps(session: Session, source: Tensor, target: Tensor, wanted: list[object]) -> tuple[Step, ...] | None:
    """The recorded view ops, or None when they do not lead to the target's sizes and strides."""
    if not wanted:
        return (
            ()
            if session.ledger.final_geometry(source).typical == session.ledger.final_geometry(target).typical
            else None
        )
    start = _start(session, source)
    log = _StepLog(session.mode)
    try:
        with functional.outside(), log:
            end = functional.replay_steps(start, wanted)
    except (RuntimeError, IndexError, ValueError):
        return None
    got, look = geometry_of(end).typical, session.ledger.final_geometry(target).typical
    same = got.size == look.size if 0 in look.size else got == look  # fakes make up strides of nothing
    if not same or end.dtype != target.dtype:
        return None
    return _chain(log.calls, start, end)


def _start(session: Session, source: Tensor) -> FakeTensor:
    """The source as it will look at run time: a recorded write may have made it denser than it is."""
    look = session.ledger.final_geometry(source)
    if look.typical == geometry_of(source).typical:
        return session.fake(source)
    with functional.outside():
        last = sum((max(n, 1) - 1) * s for n, s in zip(look.size, look.stride, strict=True))
        room = torch.empty(look.offset + 1 + last, dtype=source.dtype, device="meta")
        room = room.as_strided(look.size, look.stride, look.offset).detach()
        return FakeTensor(session.mode, room, source.device)


def _chain(calls: list[Any], start: Tensor, end: Tensor) -> tuple[Step, ...] | None:
    """Orders the logged calls into a chain from start to end; None if they do not form one."""
    steps: list[Step] = []
    current = end
    for func, args, kwargs, out in reversed(calls):
        if out is current:
            part = None
        elif isinstance(out, list | tuple) and any(o is current for o in out):
            part = next(i for i, o in enumerate(out) if o is current)
        else:
            continue
        steps.append(Step(func, tuple(args[1:]), tuple(kwargs.items()), part))
        current = args[0]
    return tuple(reversed(steps)) if current is start else None

"""Writes in a backward: a custom backward may change inputs, the gradient it is given, or what it kept.

Such a write stands in the backward program as a `copy_` to the tensor itself. Afterwards the trace
is put back, because the next backward recorded in it belongs to another call.

What `save_for_backward` keeps is written as an input is, and a second backward raises, as in eager. Other
tensors of the forward are left to eager if they are changed: memory that the caller sees too (an output),
and what is kept as an attribute, which eager lets a second backward find as the first one left it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aheadgrad.errors import FallbackError
from aheadgrad.recording.components import Component, Passage
from aheadgrad.recording.exits import Exit
from aheadgrad.recording.session import Session
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import base_of, is_view, runs_python, set_version, version
from aheadgrad.torchlayer.dispatch import no_function_modes
from aheadgrad.torchlayer.subclasses import parts_of, values_of

_COPY = torch.ops.aten.copy_.default
_NOT_LOOKED_INTO = (type, types.ModuleType, types.FunctionType, nn.Module)
_DEEPEST = 4  # steps from a context to a tensor


class _Held(NamedTuple):
    """What a traced tensor held before a backward; `value` is what it is called in programs.

    Without a name: one that must not be changed, for this reason.
    """

    value: Tensor | None
    seen: Tensor
    held: Tensor
    version: int
    reason: str = ""


class BackwardWrites:
    """Notes what inputs, tangents and kept tensors hold, and records what has changed since."""

    def __init__(
        self, session: Session, tangents: list[tuple[Tensor, Tensor]], component: Component, exits: list[Exit]
    ) -> None:
        self.session = session
        known = [
            pair for e in session.entrances for pair in zip(values_of(e.value), parts_of(e.seen), strict=True)
        ]
        known += tangents
        self.before = [_Held(value, seen, functional.unwrap(seen), version(seen)) for value, seen in known]
        self.custom = [node for node in component.nodes if runs_python(node)]
        if self.custom:
            self._keep(self.custom, {functional.storage_key(seen) for _, seen in known}, exits)

    def _keep(self, nodes: list[Any], known: set[Any], exits: list[Exit]) -> None:
        """Notes what the contexts of custom functions hold, besides inputs."""
        traced = [
            e.traced for e in exits if isinstance(e.traced, Tensor) and not isinstance(e.traced, Passage)
        ]
        shown = {functional.storage_key(part) for t in traced for part in parts_of(t)}
        for node in nodes:
            for t, saved in _kept_by(node):
                for part in parts_of(t) if functional.is_wrapped(t) else ():
                    key = functional.storage_key(part)
                    if key not in known:
                        known.add(key)
                        self.before.append(self._kept(part, saved=saved, shown=key in shown))

    def _kept(self, t: Tensor, *, saved: bool, shown: bool) -> _Held:
        """All of the memory that a tensor lies in, if it may be written and put back."""
        whole = base_of(t) if is_view(t) and functional.view_steps(t) else t
        reason = ""
        if whole is None or functional.view_steps(whole):
            reason = "a backward changes a part of what the forward computed"
        elif shown:
            reason = "a backward changes an output"
        elif not saved:
            reason = "a backward changes a tensor that its forward kept without save_for_backward"
        seen = t if whole is None else whole
        held = functional.latest(seen)
        return _Held(None if reason else held, seen, held, version(seen), reason)

    def record(self) -> None:
        with no_function_modes(), torch.no_grad():
            for value, seen, held, at, reason in self.before:
                if version(seen) == at and not self.custom and not self.session.veiled:
                    continue  # (some ops of custom functions, and those on parts, write without a word)
                now = functional.latest(seen)
                if now is held:
                    continue
                if value is not None:
                    self.session.trace.add(_COPY, (value, now), {}, None)
                functional.replace(seen, held)
                functional.commit_update(seen)
                functional.sync(seen)
                set_version(seen, at)
                if reason:
                    raise FallbackError(reason)


def _kept_by(node: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors in the context of a custom function; with save_for_backward, or as attributes."""
    with suppress(RuntimeError):  # one was changed since: its backward raises, as in eager
        yield from ((t, True) for t in node.saved_tensors if isinstance(t, Tensor))
    yield from ((t, False) for t in _inside(vars(node), _DEEPEST))


def _inside(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set):
        for part in value:
            yield from _inside(part, depth - 1)
    elif depth and isinstance(value, dict):
        yield from _inside(list(value.values()), depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, _NOT_LOOKED_INTO):
        yield from _inside(vars(value), depth - 1)

"""The partition stage: what is saved, and the programs on either side."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from aheadgrad.errors import FallbackError
from aheadgrad.options import Options
from aheadgrad.partition.custom import split_with
from aheadgrad.partition.default import choose, providers
from aheadgrad.partition.split import (
    SavedSet,
    SavedValue,
    SplitPrograms,
    backward_program,
    forward_program,
)
from aheadgrad.program.program import Program
from aheadgrad.recording.captured import Captured
from aheadgrad.recording.joint import Gradients
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import symbols_of_numbers


def partition(captured: Captured, options: Options) -> SplitPrograms:
    if options.partition != "default" and _one_backward(captured) is not None:
        return split_with(options.partition, captured)
    saved: list[SavedSet] = []
    changed = frozenset(
        id(value)
        for f in captured.facts.inputs
        if f.index >= 0 and (f.data_changed or f.storage_changed)
        for value in values_of(captured.session.entrances[f.index].value)
    )
    for g in captured.gradients:
        if g is None:
            saved.append(SavedSet())
        else:
            saved.append(
                choose(
                    captured.cutter,
                    captured.inputs,
                    captured.exits,
                    [g],
                    changed,
                    torch_like=options.one_node,
                    any_order=captured.differentiable_again and not options.one_node,
                )
            )
    together = _with_told_sizes(captured, _union(captured, saved))
    forward = forward_program(captured, together, inference=not captured.joint.components)
    backwards: list[Program | None] = []
    for g, kept in zip(captured.gradients, saved, strict=True):
        backwards.append(None if g is None else backward_program(captured, g, kept))
    return SplitPrograms(forward, backwards, saved, together, captured.gradients)


def _one_backward(captured: Captured) -> Gradients | None:
    """A partition function splits one joint graph; where eager's backward raises there is none."""
    return captured.gradients[0] if len(captured.gradients) == 1 else None


def _with_told_sizes(captured: Captured, saved: SavedSet) -> SavedSet:
    """Also the sizes that values decide and that the entry function mentions: results, shapes of views."""
    if not captured.session.trace.numbers:
        return saved
    passages = [e.traced.shape for e in captured.joint.exits[len(captured.exits) :]]
    told = _symbols([captured.facts, *passages]) & set(captured.session.trace.numbers)
    if not told:
        return saved
    known = providers(captured.cutter, captured.inputs)
    sizes = dict(saved.sizes)
    for symbol in sorted(told, key=str):
        if symbol not in known:
            raise FallbackError(f"nothing tells the size {symbol}, which values decide")
        name, number = known[symbol]
        sizes.setdefault(name, number)
    return replace(saved, sizes=tuple(sizes.items()))


def _symbols(value: Any) -> set[Any]:
    """The symbols in facts, and whatever they are made of."""
    if is_dataclass(value):
        return _symbols([getattr(value, f.name) for f in fields(value)])
    if isinstance(value, list | tuple):
        return set().union(*map(_symbols, value))
    return symbols_of_numbers(value)


def _union(captured: Captured, saved: list[SavedSet]) -> SavedSet:
    if len(saved) == 1:
        return saved[0]
    tensors: dict[int, SavedValue] = {}
    sizes: dict[str, Any] = {}
    for one in saved:
        for value in one.tensors:
            tensors.setdefault(id(value.value), value)
        sizes.update(dict(one.sizes))
    return SavedSet(tuple(tensors.values()), tuple(sizes.items()))

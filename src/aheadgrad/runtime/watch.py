"""Watching: what eager saves must not change before backward, even if our backward can do without.

Eager raises when a tensor that any op saved has been changed since. Most of these are in our
saved set too and are checked there. The others (the input of `gather`, saved for its size alone;
an input that the call changed itself and then saved) are watched: the node remembers their
version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import AliasRoot
from aheadgrad.joint.level import SAVED_BY_DATA, Component, Joint, is_handed_out, slots_apart
from aheadgrad.partition.saved import SavedSet
from aheadgrad.program.values import Value
from aheadgrad.runtime.freeing import BACKWARD_TWICE
from aheadgrad.torchlayer.autograd import keeps_graph
from aheadgrad.torchlayer.subclasses import Bundle, values_of


@dataclass(frozen=True)
class Watch:
    """A tensor of the entry function, and the outputs (of the node) whose backward rests on it.

    Without a name: the outputs whose backward works only once, because eager saves something for it.
    """

    name: str
    outputs: tuple[int, ...]


def watches(joint: Joint, component: Component, saved: SavedSet) -> list[Watch]:
    """Tensors whose version the node has to remember."""
    sources = {joint.tape.view_source(s.value) for s in saved.tensors}
    everywhere = tuple(range(len(component.exits)))
    found: dict[str, tuple[int, ...]] = {}
    for i, entrance in enumerate(joint.entrances):
        fact = joint.facts.input(i)
        if fact is None:  # first met by a backward
            continue
        if entrance.value not in sources or (fact.data_changed and fact.history_changed):
            found[f"p{i}"] = _outputs_with(component, entrance.memory)
            if not found[f"p{i}"] and _parts_saved(joint, entrance.value, sources):
                found[f"p{i}"] = everywhere
    for name, new in _updated_and_saved(joint, sources, {s.value for s in saved.tensors}).items():
        met = {*found.get(name, ()), *_meet(joint, component, new)}
        found[name] = tuple(sorted(met)) or everywhere
    for root, memory in zip(joint.facts.roots, joint.root_memory, strict=True):
        by_data = isinstance(root, AliasRoot) and root.recipe.cut == "data"
        if by_data and _outputs_with(component, memory):
            raise FallbackError(SAVED_BY_DATA)
    apart = slots_apart(joint.facts)
    for i, e in enumerate(joint.leaving):
        if type(e.value) not in (Value, Bundle) or not is_handed_out(joint.facts, e.slot):
            continue
        if joint.tape.view_source(e.value) not in sources:
            found[f"r{i}"] = _outputs_with(component, e.memory)
            if found[f"r{i}"] and e.slot in apart:
                raise FallbackError(SAVED_BY_DATA)
            if not found[f"r{i}"] and _parts_saved(joint, e.value, sources):
                found[f"r{i}"] = everywhere
    watched = [Watch(name, outputs) for name, outputs in found.items() if outputs]
    if component.once and (watched or not saved.tensors):
        watched.append(Watch("", component.once))
    return watched


def _parts_saved(joint: Joint, value: Any, sources: set[Any]) -> bool:
    """Is a part of a tensor subclass saved? Its own version counter does not move with the whole's."""
    return type(value) is Bundle and any(joint.tape.view_source(part) in sources for part in value.parts)


def _outputs_with(component: Component, memory: int | None) -> tuple[int, ...]:
    return tuple(k for k, saved in enumerate(component.saves) if memory in saved)


def _meet(joint: Joint, component: Component, sources: set[Any]) -> set[int]:
    """The outputs whose tangents are combined, in the recorded backward, with views of some values."""
    gradients = joint.gradients[component.number]
    if gradients is None:
        return set()
    tape, met = joint.tape, set[int]()
    tangents = {v: {k} for k, t in enumerate(gradients.tangents) for v in values_of(t)}
    known: set[Any] = set()  # values made from nothing but those
    for op in tape.ops:
        if op.phase != gradients.phase:
            continue
        from_tangents = set[int]().union(*(tangents.get(v, ()) for v in op.uses))
        from_sources = any(v in known or tape.view_source(v) in sources for v in op.uses)
        if from_sources:
            met |= from_tangents
        for out in op.values:
            if from_tangents:
                tangents[out] = from_tangents
            elif from_sources:
                known.add(out)
    return met


def _updated_and_saved(joint: Joint, sources: set[Any], exact: set[Any]) -> dict[str, set[Any]]:
    """Inputs whose new value (or the memory behind it) is saved, and that are not saved themselves; with
    that value.

    Those changed in sight of autograd, and those changed through `.data`: what an in-place op on a
    view saved is hidden from autograd's nodes, so the values that we save have to tell.
    """
    facts = [f for f in joint.facts.inputs if f.index in joint.updated]
    updated = [(f, joint.leaving[joint.updated[f.index]]) for f in facts]
    source = joint.tape.view_source
    if any(joint.members):
        for fact, e in updated:
            saved = any(source(v) in sources for v in values_of(e.value))
            if fact.index >= 0 and not fact.version_bumps and saved:
                raise FallbackError("memory that is saved for backward is changed through .data")
    found: dict[str, set[Any]] = {}
    for fact, e in updated:
        if fact.index < 0 or not fact.data_changed:
            continue
        if not fact.history_changed and fact.version_bumps and e.value in exact:
            continue
        new = {source(v) for v in values_of(e.value)} & sources
        if new:
            found[f"p{fact.index}"] = new
    return found


def check_watched(ctx: Any, present: tuple[bool, ...]) -> None:
    """Tensors that eager saves and we do not; the caller must not have changed them since."""
    watched: tuple[tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]], ...] | None
    watched, once = ctx.watch
    if watched is None and any(present[k] for k in once):
        raise RuntimeError(BACKWARD_TWICE)
    if not keeps_graph():
        ctx.watch = None, once
    for tensors, versions, outputs in watched or ():
        for tensor, expected in zip(tensors, versions, strict=True):
            if tensor._version != expected and any(present[k] for k in outputs):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                    f"expected version {expected} instead."
                )

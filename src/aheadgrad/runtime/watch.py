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
from aheadgrad.partition.split import SavedSet
from aheadgrad.program.slots import UpdatedInput
from aheadgrad.recording.captured import Captured
from aheadgrad.recording.components import Component
from aheadgrad.recording.exits import is_own
from aheadgrad.recording.histories import saved_attributes, view_source
from aheadgrad.torchlayer.functional import is_wrapped, storage_key
from aheadgrad.torchlayer.subclasses import Bundle, values_of

# Their recorded formula does without the result, as it may not look for zeros in the input.
_RESULT_NOT_USED = {"ProdBackward0", "ProdBackward1", "CumprodBackward0"}


@dataclass(frozen=True)
class Watch:
    """A tensor of the entry function, and the outputs (of the node) whose backward rests on it.

    Without a name: the outputs whose backward works only once, because eager saves something for it.
    """

    name: str
    outputs: tuple[int, ...]


def watches(captured: Captured, component: Component, saved: SavedSet) -> list[Watch]:
    """Tensors whose version the node has to remember."""
    by_exit = [_saved_storages(captured, component.nodes_of[i]) for i in component.exits]
    sources = {id(view_source(captured.session.trace, s.value)) for s in saved.tensors}
    found: dict[str, tuple[int, ...]] = {}
    offset = len(captured.forward.number_slots)
    everywhere = tuple(range(len(component.exits)))
    for i, entrance in enumerate(captured.session.entrances):
        fact = captured.facts.input(i)
        if fact is None:  # first met by a backward
            continue
        if id(entrance.value) not in sources or (fact.data_changed and fact.history_changed):
            found[f"p{i + offset}"] = _outputs_with(by_exit, storage_key(entrance.seen))
            if not found[f"p{i + offset}"] and _parts_saved(captured, entrance.value, sources):
                found[f"p{i + offset}"] = everywhere
    for name, new in _updated_and_saved(captured, sources, {id(s.value) for s in saved.tensors}).items():
        met = {*found.get(name, ()), *_meet(captured, component, new)}
        found[name] = tuple(sorted(met)) or everywhere
    for r, root in enumerate(captured.facts.roots):
        by_data = isinstance(root, AliasRoot) and root.recipe.cut == "data"
        if by_data and _outputs_with(by_exit, storage_key(captured.aliases.root_tensors[r])):
            raise FallbackError("an alias made with .data is returned and its memory is saved for backward")
    for i, e in enumerate(captured.exits):
        if not isinstance(e.value, Tensor | Bundle) or not is_own(captured.facts, e.slot):
            continue
        if id(view_source(captured.session.trace, e.value)) not in sources:
            found[f"r{i}"] = _outputs_with(by_exit, storage_key(e.traced))
            if not found[f"r{i}"] and _parts_saved(captured, e.value, sources):
                found[f"r{i}"] = everywhere
    watched = [Watch(name, outputs) for name, outputs in found.items() if outputs]
    once = tuple(k for k, i in enumerate(component.exits) if any(map(_saves, component.nodes_of[i])))
    if once and (watched or not saved.tensors):
        watched.append(Watch("", once))
    return watched


def _parts_saved(captured: Captured, value: Any, sources: set[int]) -> bool:
    """Is a part of a tensor subclass saved? Its own version counter does not move with the whole's."""
    if type(value) is not Bundle:
        return False
    return any(id(view_source(captured.session.trace, part)) in sources for part in value.parts)


def _outputs_with(by_exit: list[set[Any]], key: Any) -> tuple[int, ...]:
    return tuple(k for k, keys in enumerate(by_exit) if key in keys)


def _meet(captured: Captured, component: Component, sources: set[int]) -> set[int]:
    """The outputs whose tangents are combined, in the recorded backward, with views of some values."""
    gradients = next((g for g in captured.gradients if g is not None and g.component is component), None)
    if gradients is None:
        return set()
    trace, met = captured.session.trace, set[int]()
    tangents = {id(v): {k} for k, t in enumerate(gradients.tangents) for v in values_of(t)}
    known: set[int] = set()  # values made from nothing but those
    for record in trace.records:
        if record.phase != gradients.phase:
            continue
        given = record.tensors()
        from_tangents = set[int]().union(*(tangents.get(id(t), ()) for t in given))
        from_sources = any(id(t) in known or id(view_source(trace, t)) in sources for t in given)
        if from_sources:
            met |= from_tangents
        for out in record.out if isinstance(record.out, list | tuple) else (record.out,):
            if from_tangents:
                tangents[id(out)] = from_tangents
            elif from_sources:
                known.add(id(out))
    return met


def _updated_and_saved(captured: Captured, sources: set[int], exact: set[int]) -> dict[str, set[int]]:
    """Inputs whose new value (or the memory behind it) is saved, and that are not saved themselves; with
    that value.

    Those changed in sight of autograd, and those changed through `.data`: what an in-place op on a
    view saved is hidden from `_saved_storages`, so the values that we save have to tell.
    """
    changed = [
        f for f in captured.facts.inputs if f.data_changed or f.geometry is not None or f.storage_changed
    ]
    changed = [f for f in changed if f.index not in captured.in_graph_updates]
    exits = [e for e in captured.exits if isinstance(e.slot, UpdatedInput)]
    if any(m.version is not None for m in captured.session.members):
        for fact, e in zip(changed, exits, strict=True):
            saved = any(id(view_source(captured.session.trace, v)) in sources for v in values_of(e.value))
            if fact.index >= 0 and not fact.version_bumps and saved:
                raise FallbackError("memory that is saved for backward is changed through .data")
    offset = len(captured.forward.number_slots)
    found: dict[str, set[int]] = {}
    for fact, e in zip(changed, exits, strict=True):
        if fact.index < 0 or not fact.data_changed:
            continue
        if not fact.history_changed and fact.version_bumps and id(e.value) in exact:
            continue
        new = {id(view_source(captured.session.trace, v)) for v in values_of(e.value)} & sources
        if new:
            found[f"p{fact.index + offset}"] = new
    return found


def _saved_storages(captured: Captured, nodes: set[Any]) -> set[int]:
    """The storages of everything that the recorded autograd nodes saved."""
    keys: set[int] = set()
    for node in nodes:
        keys |= captured.session.hidden.get(node, set())
        for name in saved_attributes(node):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue
            _add(value, keys)
            if name == "_saved_result" and type(node).__name__ in _RESULT_NOT_USED:
                _check_unchanged(captured, value)
        try:
            _add(getattr(node, "saved_tensors", ()), keys)
        except RuntimeError:
            continue
    return keys


def _check_unchanged(captured: Captured, result: Any) -> None:
    if isinstance(result, Tensor) and storage_key(result) in captured.session.layouts.touched:
        raise FallbackError("the result of a product is changed behind autograd's back")


def _saves(node: Any) -> bool:
    """Does a node of eager's hold something that its backward frees, so that it cannot run again?"""
    if type(node).__name__ == "CopySlices":
        return True
    try:
        values = [getattr(node, name) for name in saved_attributes(node)]
        values += getattr(node, "saved_tensors", ())
    except RuntimeError:  # there is a saved tensor, though it was changed since
        return True
    return any(isinstance(t, Tensor) for v in values for t in (v if isinstance(v, tuple | list) else (v,)))


def _add(value: Any, keys: set[int]) -> None:
    if isinstance(value, Tensor):
        if is_wrapped(value):
            keys.add(storage_key(value))
    elif isinstance(value, tuple | list):
        for part in value:
            _add(part, keys)

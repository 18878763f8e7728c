"""What happened to each input, read off the trace after the run."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import Geometry, InputFacts, PartFacts, Reshape
from aheadgrad.recording.entrances import Entrance, Member
from aheadgrad.recording.geometry import geometry_of, unseen_look
from aheadgrad.recording.session import Session
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import base_of, is_view, version
from aheadgrad.torchlayer.functional import RESIZE_STORAGE
from aheadgrad.torchlayer.subclasses import Bundle, same_meta, same_value


def input_facts(session: Session, index: int, entrance: Entrance) -> InputFacts:
    """Compares an input before and after the run."""
    seen, value = entrance.seen, entrance.value
    current = session.ledger.current(seen)
    moved = functional.storage_key(seen) != entrance.storage
    held = functional.unwrap(seen)
    history = seen.grad_fn
    becomes_leaf = None
    if history is None and current.requires_grad != entrance.required_grad and entrance.is_leaf:
        becomes_leaf = current.requires_grad
    line = session.ledger.of(seen)
    if line.cut and current.requires_grad:
        raise FallbackError("an input is cut off from its history, and then gets a new one")
    if current is not seen and not is_view(current) and current.grad_fn is not None:
        raise FallbackError("a leaf input is cut off from its history and then gets a new one")
    parts = part_facts(session, current, entrance) if entrance.form is not None else None
    data_changed = functional.has_data_mutation(seen) and not same_value(held, value)
    moved_on = functional.has_data_mutation(seen) or version(seen) != entrance.version
    if session.ledger.memory_known_by(entrance.storage).beyond and moved_on:
        raise FallbackError("as_strided takes from an input what lies outside of it, and memory is written")
    geometry = _new_geometry(session, seen, current, geometry_of(value))
    if data_changed and geometry is not None and math.prod(geometry.size) != value.numel():
        raise FallbackError("an input is changed and as_strided_ shrinks or grows it")
    storage_changed = moved and parts is None and held is not value
    return InputFacts(
        index,
        adopts=_adopted(session, entrance) if storage_changed else None,
        final_geometry=session.ledger.geometry_in_eager(current) if storage_changed else None,
        old_memory_changed=storage_changed and _old_memory_changed(entrance),
        final_bytes=_final_bytes(session, seen) if data_changed or storage_changed else None,
        data_changed=data_changed or bool(parts and parts.exchanged),
        geometry=geometry,
        parts=parts,
        storage_changed=storage_changed,
        history_changed=_history_changed(session, seen, history, entrance.history),
        history_dropped=history is None and entrance.history is not None,
        becomes_leaf=becomes_leaf,
        leaf_meanwhile=not entrance.required_grad and line.cut and line.made_leaf,
        version_bumps=version(seen) - entrance.version,
        history_look=unseen_look(current) if geometry is not None and not is_view(current) else None,
    )


def part_facts(session: Session, current: Tensor, entrance: Entrance) -> PartFacts | None:
    """What happened to the parts of a subclass; None if nothing."""
    value: Bundle = entrance.value
    now: Bundle = functional.unwrap(current)
    before, after = value.form, now.form
    if after.kind is not before.kind or after.names != before.names or len(now.parts) != len(value.parts):
        raise FallbackError(f"{entrance.slot.describe()} is put together in another way inside")
    if not same_meta(after.meta, before.meta):
        raise FallbackError(f"the metadata of {entrance.slot.describe()} is changed inside")
    keys = functional.storage_key(current)
    exchanged = tuple(k for k, key in enumerate(keys) if key != entrance.storage[k])
    each = enumerate(zip(now.parts, value.parts, functional.wrappers(current), strict=True))
    changed = tuple(
        k for k, (a, b, w) in each if a is not b and functional.has_data_mutation(w) and k not in exchanged
    )
    reshapes = _reshapes(session, current)
    same = [p.offset for p in after.plain] == [p.offset for p in before.plain] and after == before
    if (exchanged and reshapes) or not (same or exchanged or reshapes):
        raise FallbackError(f"{entrance.slot.describe()} gets another shape in a way that cannot be repeated")
    return PartFacts(changed, exchanged, reshapes) if changed or exchanged or reshapes else None


def _reshapes(session: Session, t: Tensor) -> tuple[Reshape, ...]:
    return tuple(done.call for done in session.ledger.reshapes(t))


def _adopted(session: Session, entrance: Entrance) -> int | None:
    """The input whose memory an input has taken over."""
    key = functional.storage_key(entrance.seen)
    return next((i for i, e in enumerate(session.entrances) if e is not entrance and e.storage == key), None)


def _old_memory_changed(entrance: Entrance) -> bool:
    old = entrance.old_memory
    return old is not None and functional.unwrap(old) is not entrance.value


def _final_bytes(session: Session, seen: Tensor) -> int | None:
    """An input that is written and then emptied: emptied last, after its update."""
    held = functional.unwrap(seen)
    for record in reversed(session.trace.records):
        if record.target is RESIZE_STORAGE and record.args[0] is held and record.args[1] == 0:
            record.keep = False
            return 0
    return None


def member_facts(session: Session, k: int, member: Member) -> InputFacts:
    """What happened to an input that entered as an alias; its data changes with its owner's."""
    current = session.ledger.current(member.seen)
    history = member.seen.grad_fn if member.is_root else None
    changed = member.is_root and _history_changed(session, member.seen, history, member.history)
    if (
        not member.is_root
        and not member.required_grad
        and (_made_a_leaf(member.seen) or (current is not member.seen and current.requires_grad))
    ):
        raise FallbackError("a view among inputs that share memory is made a leaf inside")
    becomes_leaf = None
    if member.is_root and history is None and member.seen.requires_grad != member.required_grad:
        becomes_leaf = member.seen.requires_grad
    reshapes = _reshapes(session, member.seen)
    return InputFacts(
        -1 - k,
        parts=PartFacts(reshapes=reshapes) if reshapes else None,
        data_changed=changed,
        geometry=_new_geometry(session, member.seen, current, member.geometry),
        history_changed=changed or _reshaped_in_sight(session, member.seen),
        becomes_leaf=becomes_leaf,
        version_bumps=0 if member.version is None else version(member.seen) - member.version,
    )


def _made_a_leaf(view: Tensor) -> bool:
    """`requires_grad_()` on a view whose base requires no grad."""
    base = base_of(view)
    return view.requires_grad and base is not None and not base.requires_grad


def _reshaped_in_sight(session: Session, seen: Tensor) -> bool:
    line = session.ledger.of(seen)
    return line.tracked or any(done.tracked for done in line.reshapes)


def _history_changed(session: Session, seen: Tensor, history: Any, before: Any) -> bool:
    return (history is not None and history is not before) or _reshaped_in_sight(session, seen)


def _new_geometry(session: Session, seen: Tensor, current: Tensor, before: Geometry) -> Geometry | None:
    if current is seen and not functional.has_metadata_mutation(seen):
        return None
    after = session.ledger.geometry_in_eager(current)
    return after if after != before else None

"""Inputs that share storage: harmless until one of them is changed.

Then they have to enter the program as aliases of one owner. Autograd's own notion of a base
decides who is a view of whom; a tensor that merely shares storage (after `detach()`) is a root
of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import InputFacts
from aheadgrad.program.slots import ClosedOver
from aheadgrad.recording.forward import Call, Forward, SharedGroup
from aheadgrad.recording.geometry import geometry_of
from aheadgrad.recording.input_facts import input_facts
from aheadgrad.recording.session import Session
from aheadgrad.recording.shared_entrances import is_flat, whole_storage
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import (
    CreationMeta,
    base_of,
    creation_meta,
    is_leaf_view,
    is_view,
    same_version_counter,
)
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.memory import reach
from aheadgrad.torchlayer.subclasses import is_foreign, parts_of


def storage_groups(inputs: list[Tensor]) -> list[list[Tensor]]:
    """Different inputs that live in one storage, grouped."""
    groups: dict[int, list[Tensor]] = {}
    seen: set[int] = set()
    for real in inputs:
        strided = real.layout is torch.strided or is_foreign(real)
        if id(real) in seen or isinstance(real, FakeTensor) or not strided:
            continue
        seen.add(id(real))
        groups.setdefault(functional.storage_key(real), []).append(real)
    return list(groups.values())


def extent(t: Tensor) -> tuple[int, int]:
    """First and last byte that a tensor may touch in its storage."""
    size = t.element_size()
    first = int(t.storage_offset()) * size
    return first, first + int(reach(t.size(), t.stride())) * size - 1


def _overlap(a: Tensor, b: Tensor) -> bool:
    (a0, a1), (b0, b1) = extent(a), extent(b)
    return a0 <= b1 and b0 <= a1


def merge_shared(forward: Forward, call: Call) -> Call | None:
    """The call with changed siblings merged; None when there is nothing to merge."""
    if call.shared:
        return None
    session = forward.session
    facts = {id(e.real): input_facts(session, i, e) for i, e in enumerate(session.entrances)}
    slots = {id(real): slot for slot, real in call.inputs}
    _check_lifted(forward, facts)
    if session.veiled:
        _check_parts(session, facts)
    groups = []
    hands_out_parts = any(
        isinstance(v, Tensor) and is_view(v) and creation_meta(v) != CreationMeta.DEFAULT
        for v in forward.outputs
    )
    graded = torch.is_grad_enabled() and any(e.real.requires_grad for e in session.entrances)
    for tensors in storage_groups([real for _, real in call.inputs]):
        members = _concerned(tensors, facts, hands_out_parts=hands_out_parts, graded=graded)
        if members:
            groups.append(_group(members, [slots[id(m)] for m in members]))
    return replace(call, shared=tuple(groups)) if groups else None


def merge_all(call: Call) -> Call | None:
    """The call with all siblings merged that overlap; None when there are none."""
    if call.shared:
        return None
    slots = {id(real): slot for slot, real in call.inputs}
    groups = [
        _group(tensors, [slots[id(t)] for t in tensors])
        for tensors in storage_groups([real for _, real in call.inputs])
        if any(_overlap(a, b) for i, a in enumerate(tensors) for b in tensors[:i])
    ]
    return replace(call, shared=tuple(groups)) if groups else None


def _check_lifted(forward: Forward, facts: dict[int, InputFacts]) -> None:
    """A closed-over tensor that shares memory with another input may not be changed, nor the other."""
    reals = [e.real for e in forward.session.entrances]
    lifted = {id(e.real) for e in forward.session.entrances if isinstance(e.slot, ClosedOver)}
    for tensors in storage_groups(reals) if lifted else ():
        reached = len(tensors) > 1 and any(id(t) in lifted for t in tensors)
        if reached and any(_changes(facts[id(t)]) for t in tensors):
            raise FallbackError("a closed-over tensor shares memory with an input, and one is changed")


def _check_parts(session: Session, facts: dict[int, InputFacts]) -> None:
    """Subclasses are merged as wholes: parts that share memory in other ways may not be changed."""
    found: dict[int, list[tuple[object, Tensor, Tensor]]] = {}
    for e in session.entrances:
        for part in parts_of(e.real):
            key = functional.storage_key(part)
            found.setdefault(key, []).append((functional.storage_key(e.real), part, e.real))
    for group in found.values():
        wholes = {key for key, _, _ in group}
        one_each = len({id(real) for _, _, real in group}) == len(group)
        if len(group) < 2 or (len(wholes) == 1 and one_each):
            continue
        same = len({id(part) for _, part, _ in group}) == 1 and all(is_foreign(r) for _, _, r in group)
        if not same and any(_changes(facts[id(real)]) for _, _, real in group):
            raise FallbackError("parts of tensor subclasses share memory, and one of them is changed")


def _concerned(
    tensors: list[Tensor], facts: dict[int, InputFacts], *, hands_out_parts: bool, graded: bool
) -> list[Tensor]:
    """Those of one storage that have to enter together.

    Parts that do not touch are independent, but for one thing: they may share a version counter. Views
    with several outputs (`split`) remember at which version they were made, and so does what is kept
    for a backward.
    """
    changed = [t for t in tensors if _changes(facts[id(t)]) or facts[id(t)].version_bumps]
    if len(tensors) == 1:
        only, fact = tensors[0], facts[id(tensors[0])]
        if not is_view(only) or not only.requires_grad or fact.storage_changed:
            return []
        special = creation_meta(only) != CreationMeta.DEFAULT and fact.version_bumps > 0
        return tensors if special or fact.geometry is not None else []
    if any(
        hands_out_parts or _remembers_version(t) or _overlap(t, c) or (graded and same_version_counter(t, c))
        for c in changed
        for t in tensors
        if t is not c
    ):
        return tensors
    return []


def _remembers_version(t: Tensor) -> bool:
    """Part of a `split`, or made under no_grad: refuses to be used once the counter has moved on."""
    return is_view(t) and t.requires_grad and bool(creation_meta(t) != CreationMeta.DEFAULT)


def check_reshapes(forward: Forward) -> None:
    """A view that changed its shape must not be used after its memory has changed, nor leave so."""
    session = forward.session
    leaving = [v for v in forward.outputs if isinstance(v, Tensor)] + [m.seen for m in session.members]
    ledger = session.ledger
    if ledger.has_reshapes and (ledger.doubted or any(map(ledger.in_doubt, leaving))):
        raise FallbackError("a view of a tensor subclass changes its shape, and is written to after that")
    given = [e for e in session.entrances if is_view(e.real) and not e.required_grad]
    if any(ledger.reshapes(e.seen) and ledger.current(e.seen).requires_grad for e in given):
        raise FallbackError("a view of a tensor subclass changes its shape, and gets a history")


def check_bases(session: Session) -> None:
    """A subclass that changes its shape in place while other inputs are views of it: eager would make
    these views again from the new shape."""
    reshapes = session.ledger.reshapes
    reshaped = [id(base_of(m.seen)) for m in session.members if reshapes(m.seen)]
    if len(set(reshaped)) < len(reshaped):
        raise FallbackError("several views of one tensor subclass change their shapes")
    for member in session.members:
        base = base_of(member.seen)
        if base is not None and reshapes(base):
            raise FallbackError("a tensor subclass changes its shape, and other inputs are views of it")


def _changes(fact: InputFacts) -> bool:
    return fact.data_changed or fact.storage_changed or fact.geometry is not None


def _holds_all(root: Tensor, roots: list[Tensor], members: list[Tensor]) -> bool:
    """Is every element of the others an element of this one?"""
    if len(roots) == 1:
        return True
    if is_foreign(root):  # part by part
        split = [[parts_of(t) for t in some] for some in ([root], roots, members)]
        if len({len(parts) for some in split for parts in some}) != 1:
            return False
        columns = [[[parts[k] for parts in some] for some in split] for k in range(len(split[0][0]))]
        return all(_holds_all(one, *others) for (one,), *others in columns)
    first, last = extent(root)
    for t in (*roots, *members):
        (start, end), alike = extent(t), t.dtype == root.dtype and geometry_of(t) == geometry_of(root)
        if start < first or end > last or not (alike or is_flat(root) or base_of(t) is root):
            return False
    return True


def _group(members: list[Tensor], slots: list[object]) -> SharedGroup:
    roots: list[Tensor] = []
    for member in members:
        base = base_of(member)
        root = member if base is None else base
        if all(r is not root for r in roots):
            roots.append(root)
    if any(is_leaf_view(m) for m in members):
        raise FallbackError("an input that is a view, and a leaf all the same, shares memory that is changed")
    able = [r for r in roots if _holds_all(r, roots, members)]
    if not able:
        return _around(roots, members, slots)
    owner = next((r for r in able if r.requires_grad and not r.is_leaf), None)
    owner = owner if owner is not None else next((r for r in able if r.requires_grad), able[0])
    ordered = [owner, *(r for r in roots if r is not owner)]
    return SharedGroup(tuple(ordered), _counters(ordered), tuple(members), tuple(slots))  # type: ignore[arg-type]


def _around(roots: list[Tensor], members: list[Tensor], slots: list[object]) -> SharedGroup:
    """The group of inputs of which none holds all others: the owner is all of their memory."""
    ordered = [whole_storage(roots[0]), *roots]
    return SharedGroup(tuple(ordered), _counters(ordered), tuple(members), tuple(slots), made=True)  # type: ignore[arg-type]


def _counters(roots: list[Tensor]) -> tuple[int, ...]:
    """For each the first of them that has the same version counter."""
    return tuple(next(k for k, r in enumerate(roots) if same_version_counter(r, t)) for t in roots)

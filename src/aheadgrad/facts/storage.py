"""Inputs that share storage: harmless until one of them is changed.

Then they have to enter the program as views of one base. The base is the tensor that autograd
itself knows as their common base.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from aheadgrad.capture.forward import Call, Forward, SharedGroup
from aheadgrad.errors import FallbackError
from aheadgrad.facts.mutations import input_facts
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import base_of, is_view
from aheadgrad.torchlayer.fake import FakeTensor


def storage_groups(call: Call) -> list[list[int]]:
    """Positions of inputs that live in one storage, for storages with several."""
    groups: dict[int, list[int]] = {}
    seen: set[int] = set()
    for i, (_, real) in enumerate(call.inputs):
        if id(real) in seen or isinstance(real, FakeTensor) or real.layout.__str__() != "torch.strided":
            continue
        seen.add(id(real))
        groups.setdefault(functional.storage_key(real), []).append(i)
    return [g for g in groups.values() if len(g) > 1]


def merge_shared(forward: Forward, call: Call) -> Call | None:
    """The call with changed siblings merged into bases; None when there is nothing to merge."""
    if call.shared:
        return None
    shared = []
    facts = {id(e.real): input_facts(i, e) for i, e in enumerate(forward.session.entrances)}
    for group in storage_groups(call):
        members = [call.inputs[i][1] for i in group]
        if all(not facts[id(m)].data_changed and not facts[id(m)].storage_changed for m in members):
            continue
        shared.append(_group(call, group, members))
    return replace(call, shared=tuple(shared)) if shared else None


def _group(call: Call, positions: list[int], members: list[Tensor]) -> SharedGroup:
    bases = [base_of(m) if is_view(m) else m for m in members]
    base = bases[0]
    if base is None or any(b is not base for b in bases):
        raise FallbackError("inputs that share memory, and are changed, have no common base in autograd")
    if any(m.dtype != base.dtype for m in members):
        raise FallbackError("inputs that share memory, and are changed, are of different dtypes")
    paths = tuple(call.inputs[i][0].describe() for i in positions)
    return SharedGroup(base, tuple(members), paths)

"""Exits: the values that leave the program, and which of them carry gradients back in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.facts.facts import (
    AliasRoot,
    Facts,
    Fresh,
    FreshRoot,
    FunctionView,
    InputFacts,
    InputRoot,
    IsRoot,
    ViewOf,
)
from aheadgrad.joint.level import is_handed_out, slot_of_root
from aheadgrad.program.slots import OldMemory, Slot, UpdatedInput, UserOutput, ViewBase
from aheadgrad.recording.forward import Forward
from aheadgrad.recording.output_facts import Aliases
from aheadgrad.recording.session import Session
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import base_of, is_view

aten = torch.ops.aten


@dataclass(eq=False)
class Exit:
    """One output of the forward program."""

    slot: Slot
    traced: Any
    value: Any
    differentiable: bool
    unreachable: bool = False
    handed_out: bool = False  # as it is, rather than made again from a root
    updates: int | None = None  # an input that is there before the call, and holds this after it


def make_exits(forward: Forward, facts: Facts, aliases: Aliases, in_graph: frozenset[int]) -> list[Exit]:
    """In the order that all PyTorch backends expect: updated inputs, user outputs, view bases."""
    session = forward.session
    exits = []
    for fact in facts.inputs:
        if fact.index in in_graph or not (fact.data_changed or fact.geometry or fact.storage_changed):
            continue
        given = session.input(fact.index)
        current = session.ledger.current(given.seen)
        tracked = fact.data_changed and fact.history_changed
        own = fact.only_written and not session.members and not _made_anew(session, fact.index)
        new = Exit(UpdatedInput(given.slot), current, _value(current), tracked, handed_out=own)
        new.updates = fact.index if own else None
        exits.append(new)
        if fact.old_memory_changed:
            old = session.entrances[fact.index].old_memory
            exits.append(Exit(OldMemory(given.slot), old, _value(old), False))
    for j, traced in enumerate(forward.outputs):
        tracked = _carries_gradient(facts, j)
        own = is_handed_out(facts, UserOutput(j))
        exits.append(Exit(UserOutput(j), traced, _value(traced), tracked, handed_out=own))
    for k, traced in enumerate(aliases.bases):
        root = next(r for r in facts.roots if getattr(r, "base", None) == k)
        tracked = traced.requires_grad and traced.grad_fn is not None
        exits.append(Exit(ViewBase(k), traced, _value(traced), tracked, _unreachable(facts, root)))
    return exits


def _made_anew(session: Session, index: int) -> bool:
    """Autograd makes the history of a view anew, once its memory has changed in other ways."""
    given = session.entrances[index]
    latest = session.ledger.memory(given.seen).latest
    seen = latest is not None and (latest is given.seen or base_of(latest) is given.seen)
    return is_view(given.real) and not seen


def _unreachable(facts: Facts, root: Any) -> bool:
    """A base that is only seen through views made under no_grad: no gradient can come back to it."""
    views = [f for f in facts.outputs if isinstance(f, ViewOf) and facts.roots[f.root] is root]
    return bool(views) and all(v.without_grad for v in views)


@dataclass(frozen=True, eq=False)
class GrownView:
    """An output that is made again from a root: an input, or an output of the program (`root`)."""

    output: int
    traced: Tensor
    root: Slot | None


def grown_views(facts: Facts, outputs: list[Any], exits: list[Exit]) -> list[GrownView]:
    """Views with a history that can be made as soon as their root is there."""
    found = []
    for j, fact in enumerate(facts.outputs):
        if not isinstance(fact, ViewOf) or not fact.plain or outputs[j].grad_fn is None:
            continue
        root = facts.roots[fact.root]
        if isinstance(root, InputRoot):
            given = facts.input(root.index)
            new = next((e.slot for e in exits if e.updates is not None and e.updates == root.index), None)
            if root.index >= 0 and given is not None and (given.untouched or new is not None):
                found.append(GrownView(j, outputs[j], new))
        elif isinstance(root, FreshRoot) and root.differentiable:
            found.append(GrownView(j, outputs[j], slot_of_root(root)))
    return found


def _value(traced: Any) -> Any:
    if isinstance(traced, Tensor):
        return functional.unwrap(traced)
    return traced


def _carries_gradient(facts: Facts, j: int) -> bool:
    fact = facts.outputs[j]
    if isinstance(fact, Fresh | FunctionView):
        return fact.differentiable
    root = facts.roots[fact.root] if isinstance(fact, IsRoot) else None
    if isinstance(root, FreshRoot | AliasRoot):
        return root.output == j and (isinstance(root, AliasRoot) or root.differentiable)
    return False


def inner_leaves(facts: Facts, aliases: Aliases, outputs: list[Any]) -> list[Any]:
    """Leaves that the function made itself and returned: gradients stop (and arrive) there."""
    found: list[Any] = []
    for j, fact in enumerate(facts.outputs):
        if isinstance(fact, Fresh | ViewOf) and fact.leaf:
            found.append(("output", j, outputs[j]))
    for r, root in enumerate(facts.roots):
        if isinstance(root, AliasRoot | FreshRoot) and root.leaf:
            found.append(("root", r, aliases.root_tensors[r]))
    return found


def kept_inside(session: Session, facts: Facts, *, keep: bool, any_input: bool) -> frozenset[int]:
    """Inputs whose update the graph makes itself: those that autograd need not see. If not `any_input`, those
    that stay where they are from call to call: buffers.

    The graph knows nothing of tensor subclasses, which are updated as wholes.
    """
    plain = {i for i, e in enumerate(session.entrances) if e.form is None and (any_input or e.is_static)}
    return frozenset(f.index for f in facts.inputs if keep and f.index in plain and _can_stay(f))


def _can_stay(fact: InputFacts) -> bool:
    if fact.index < 0 or fact.history_changed or fact.history_dropped:
        return False
    if fact.final_bytes is not None or fact.old_memory_changed:
        return (
            False  # emptied at the very end, after its update; or something is to be done to its old memory
        )
    if fact.storage_changed:
        return True
    return fact.data_changed and fact.geometry is None


def copies(session: Session, facts: Facts, kept: frozenset[int]) -> list[tuple[Tensor, Any]]:
    """Inputs that a graph with a backward copies first, because they change outside of it.

    Such a graph begins with a copy of that input (`clone`; `view` when only its sizes change), as every
    backend of PyTorch knows it.
    """
    found: list[tuple[Tensor, Any]] = []
    for fact in facts.inputs:
        if fact.index < 0 or fact.index in kept or fact.storage_changed:
            continue
        if fact.final_bytes is not None:
            continue  # its memory comes and goes: there may be nothing to copy yet
        entrance = session.entrances[fact.index]
        if fact.data_changed and session.ledger.current(entrance.seen).requires_grad:
            found.append((entrance.value, aten.clone.default))
        elif fact.geometry is not None and not fact.data_changed:
            found.append((entrance.value, aten.view.default))
    return found

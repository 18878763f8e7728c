"""Updates: inputs that the function changed get their new values, sizes, storage and history.

A change that autograd saw (`x.mul_(2)`) is made in grad mode, from the node's output. A change
that it did not see (`no_grad`, `detach()`) is made without grad mode. Either way the version
counter moves as far as it did in the recorded run.
"""

from __future__ import annotations

from collections.abc import Iterable

from aheadgrad.conventions import whole_subclasses
from aheadgrad.conventions.assembly import Assembly, emit_bump, emit_bumps, geometry_text, without_grad
from aheadgrad.conventions.interior import keep_viewed
from aheadgrad.emit.script import Script
from aheadgrad.facts.facts import InputFacts
from aheadgrad.torchlayer.functional import RESIZE_STORAGE


def emit_hidden(script: Script, a: Assembly) -> None:
    """Changes that autograd did not see; grad mode is off here."""
    whole_subclasses.emit_parts(script, a)
    for fact in a.facts.inputs:
        if fact.index in a.joint.in_graph and fact.adopts is not None:
            # The graph adopts a copy; in eager both inputs live in one memory from now on.
            _emit_adoption(script, a, fact, a.input_names[fact.index], "")
            emit_bump(script, a.input_names[fact.index], -1 if not a.inference else 0)
        if fact.index in a.joint.in_graph or fact.history_changed or fact.history_dropped:
            continue
        _emit_update(script, a, fact)


def emit_tracked(script: Script, a: Assembly) -> None:
    """Changes that autograd saw; grad mode is on here."""
    for fact in a.facts.inputs:
        if fact.history_dropped:
            script.line(f"{a.input_names[fact.index]}.detach_()")
        if (fact.history_changed or fact.history_dropped) and fact.index not in a.updated:
            _emit_update(script, a, fact)
        if fact.becomes_leaf is False or fact.leaf_meanwhile:
            script.line(f"{a.input_names[fact.index]}.requires_grad_(False)")


def emit_ahead(script: Script, a: Assembly, index: int) -> None:
    """The change of an input that a node, or a view, needs as it is after the call."""
    fact = a.facts.input(index)
    if fact is not None and fact.only_written and index not in a.updated:
        a.updated.add(index)
        _emit_update(script, a, fact)


def _emit_update(script: Script, a: Assembly, fact: InputFacts) -> None:
    new = f"r{a.joint.updated.get(fact.index)}"
    target = a.input_names[fact.index]
    if fact.parts is not None:
        # First, as autograd remembers at which version it made a view's history.
        by = 0 if a.inference else fact.version_bumps - whole_subclasses.own_bumps(fact)
        if by > 0 or fact.index < 0:
            emit_bump(script, target, by)
        whole_subclasses.emit_history(script, a, fact)
        if by < 0 and fact.index >= 0:
            emit_bump(script, target, by)
        return
    own = _own_bumps(fact)
    shared = fact.index < 0 and not fact.version_bumps  # a counter that has moved already, for another tensor
    ahead = shared or (fact.index >= 0 and fact.history_changed and fact.version_bumps)
    by = 0 if a.inference else -own if ahead else fact.version_bumps - own
    first = shared or fact.version_bumps >= own  # as above; but no counter may go below zero
    emit_bump(script, target, by if first else 0)
    if fact.storage_changed:
        _emit_adoption(script, a, fact, target, new)
    elif fact.geometry is not None:
        script.line(f"{target}.as_strided_({geometry_text(script, fact.geometry)})")
    if fact.data_changed and (not fact.storage_changed or fact.history_changed):
        script.line(f"{target}.copy_({new})")
    if fact.final_bytes is not None:
        resize = script.names.name(RESIZE_STORAGE, "resize_storage")
        script.line(f"{resize}({target}, {fact.final_bytes})")
    emit_bump(script, target, 0 if first else by)


def _emit_adoption(script: Script, a: Assembly, fact: InputFacts, target: str, new: str) -> None:
    """`x.set_(y)`: x takes over the memory of another input, or of a tensor made inside."""
    if fact.old_memory_changed:
        script.line(f"{target}.detach().copy_(r{a.joint.old_memory[fact.index]})")
    if fact.adopts is None:
        source = f"{new}.detach()"
    else:
        g = fact.final_geometry
        assert g is not None
        source = f"{a.input_names[fact.adopts]}.untyped_storage(), "
        source += ", ".join(script.names.literal(part) for part in (g.offset, g.size, g.stride))
    with without_grad(script, when=fact.history_changed):
        script.line(f"{target}.set_({source})")


def _own_bumps(fact: InputFacts) -> int:
    """How often our own update moves the version counter."""
    if fact.storage_changed:
        return 1 + fact.old_memory_changed + (fact.data_changed and fact.history_changed)
    return (fact.geometry is not None) + fact.data_changed


def emit_versions(script: Script, a: Assembly) -> None:
    """Version counters move before anything is saved: what is saved was saved after the changes."""
    if a.inference:
        return
    bumps = []
    for fact in a.facts.inputs:
        if fact.index in a.joint.in_graph:
            bumps.append((a.input_names[fact.index], fact.version_bumps - 1))  # one is the graph's
        elif fact.index >= 0 and fact.history_changed and fact.parts is None:
            bumps.append((a.input_names[fact.index], fact.version_bumps))
    emit_bumps(script, bumps)


def emit_watches(script: Script, a: Assembly) -> None:
    """What a node saved of an updated input must not change before backward, as in eager."""
    for node in a.nodes:
        first = node.exits[0]
        made = f"{'r' if first < a.joint.count else 'passage'}{first}.grad_fn"
        if node.watches:
            names: dict[tuple[int, ...], list[str]] = {}
            for w in node.watches:
                names.setdefault(w.outputs, []).extend([w.name] if w.name else [])
            watched = "".join(
                f"(({_all(_held(a, n) for n in here)}), ({_all(f'{n}._version' for n in here)}), {outputs}), "
                for outputs, here in names.items()
                if here
            )
            once = next((w.outputs for w in node.watches if not w.name), ())
            script.line(f"{made}.watch = (({watched}), {once})")
        if node.viewed:
            given = ", ".join(a.input_names[i] for i in node.viewed)
            script.line(f"{script.names.name(keep_viewed, 'keep_viewed')}({made}, {given})")


def _all(texts: Iterable[str]) -> str:
    return "".join(f"{text}, " for text in texts)


def _held(a: Assembly, name: str) -> str:
    """What shares a tensor's version counter, and does not hold on to the node."""
    changed = {f"p{f.index}" for f in a.facts.inputs if f.history_changed}
    return f"{name}.detach()" if name.startswith("r") or name in changed else name


def emit_leaves(script: Script, a: Assembly) -> None:
    """`requires_grad_()` on an input: before the node, so that gradients reach it."""
    for fact in a.facts.inputs:
        if fact.becomes_leaf or fact.leaf_meanwhile:
            script.line(f"{a.input_names[fact.index]}.requires_grad_()")

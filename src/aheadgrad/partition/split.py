"""Splitting: `primals -> (outs, saved)` and `(saved, tangents) -> grads`.

A partitioner chooses the values to save; only this file builds the two programs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from aheadgrad.errors import FallbackError, InvalidProgram
from aheadgrad.joint.level import Gradients, Joint, Level
from aheadgrad.partition.choose import choose, make_table, providers
from aheadgrad.partition.custom import split_with
from aheadgrad.partition.plan import DEFAULT, demands_of
from aheadgrad.partition.saved import SavedSet, SavedValue, Split
from aheadgrad.partition.table import Table
from aheadgrad.program.check import check
from aheadgrad.program.cut import Sizes
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Between, Slot, Tangent, opened
from aheadgrad.program.tape import Tape
from aheadgrad.program.values import Port, Value
from aheadgrad.torchlayer.fake import FakeTensorMode
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import Number


def split(joint: Joint, mode: FakeTensorMode | None = None) -> Split:
    """What is saved, and the programs on either side; `mode` is for the graphs of partition functions."""
    given = joint.options.partition
    if callable(given) and len(joint.gradients) == 1 and joint.gradients[0] is not None:
        return split_with(given, joint, mode)  # where eager's backward raises there is nothing to split
    saved = tuple(SavedSet() if g is None else _choose(joint, g) for g in joint.gradients)
    together = _with_told_sizes(joint, _union(saved))
    forward = forward_program(joint, together, inference=not joint.components)
    backwards = tuple(
        None if g is None else backward_program(joint, g, kept)
        for g, kept in zip(joint.gradients, saved, strict=True)
    )
    return Split(forward, backwards, saved, together, joint.gradients)


def _choose(joint: Joint, gradients: Gradients) -> SavedSet:
    demands = demands_of(joint.options)
    plain = demands is DEFAULT and not joint.tape.has_regions
    given = [] if joint.options.one_node else [p.value for p in joint.ports() if type(p.value) is Value]
    stay = set(given).difference(joint.changed, joint.reshaped)
    return choose(table_of(joint, gradients, plain=plain), joint.ports(), demands, stay)


def table_of(joint: Joint, gradients: Gradients, *, plain: bool = False) -> Table:
    """What there is to choose from for one backward. `plain`: nothing will be computed again."""
    leaving = [v for e in joint.leaving for v in values_of(e.value)]
    changed = joint.changed if plain else joint.changed | joint.reshaped
    return make_table(
        joint.cutter(same=joint.same(gradients)),
        joint.ports(),
        leaving,
        gradients,
        changed,
        moves=joint.options.one_node,
        seen=() if plain else _seen(joint, gradients),
        results=() if plain else [v for v in leaving if type(v) is Value],
        policies=joint.options.policies,
    )


def _seen(joint: Joint, gradients: Gradients) -> set[Value]:
    """Inputs and outputs that eager does not save, but for parameters: nobody changes those in between."""
    kept = frozenset().union(*gradients.component.saves)
    found = [e.value for e in joint.entrances if not e.static and e.memory not in kept]
    found += [e.value for e in joint.leaving if e.memory not in kept]
    return {v for value in found for v in values_of(value) if type(v) is Value}


def forward_program(joint: Joint, saved: SavedSet, *, inference: bool) -> Program:
    outputs = [*joint.results(inference=inference), *saved.outputs]
    role = "inference" if inference else "forward"
    ports = joint.ports()
    if inference:  # as every backend of PyTorch knows them, and from 0 on
        ports = [replace(port, name=f"arg{i}_1") for i, port in enumerate(ports)]
    same = joint.same(given={s.value for s in saved.tensors})
    return check(joint.cutter(same=same).cut(role, ports, outputs, {"forward"}, joint.writes))


def tangent_ports(order: int, slots: Iterable[Slot], gradients: Gradients) -> list[Port]:
    """The tangents that a backward is given, or their parts.

    `tangents_1`, as all backends expect; from the second order on the order is in the name.
    """
    given = opened(zip(map(Tangent, slots), gradients.tangents, strict=True))
    last = "" if order == 0 else f"_{order + 1}"
    return [Port(slot, t, f"tangents_{k}{last}") for k, (slot, t) in enumerate(given, 1) if t is not None]


def backward_program(
    level: Level,
    gradients: Gradients,
    saved: SavedSet,
    tape: Tape | None = None,
    sizes: Sizes | None = None,
    handed: tuple[Value, ...] = (),
) -> Program:
    """From what the forward saved to gradients; `tape` if they were recorded later than the level.

    `handed` are tangents that come in on the way.
    """
    slots = [level.exits[i].slot for i in gradients.component.exits]
    ports = saved.ports + tangent_ports(level.order, slots, gradients)
    ports += [Port(Tangent(Between(k)), v, f"handed_{k + 1}") for k, v in enumerate(handed)]
    outputs = opened(level.gradient_outputs(gradients))
    late = level.computes_again
    same = level.same(gradients, {s.value for s in saved.tensors}, tape)
    try:
        return check(
            level.cutter(tape, sizes, same).cut("backward", ports, outputs, {gradients.phase}, late=late)
        )
    except AssertionError as error:
        raise InvalidProgram(
            f"A backward for this pattern of tangents needs a value that the forward did not save ({error})."
        ) from error


def _with_told_sizes(joint: Joint, saved: SavedSet) -> SavedSet:
    """Also the sizes that values decide and that the entry function mentions: results, shapes of views."""
    makers = joint.tape.makers
    if not makers:
        return saved
    passages = [e.size for e in joint.exits[joint.count :]]
    told = _symbols([joint.facts, *passages]) & set(makers)
    if not told:
        return saved
    known = providers(joint.tape, joint.ports())
    sizes = dict(saved.sizes)
    for symbol in sorted(told, key=str):
        if symbol not in known:
            raise FallbackError(f"nothing tells the size {symbol}, which values decide")
        name, number = known[symbol]
        sizes.setdefault(name, number)
    return replace(saved, sizes=tuple(sizes.items()))


def _symbols(value: Any) -> set[Any]:
    """The symbols in facts, and whatever they are made of."""
    if type(value) is Number:
        return set(value.expr.free_symbols)
    if is_dataclass(value):
        return _symbols([getattr(value, f.name) for f in fields(value)])
    if isinstance(value, dict):
        return _symbols(list(value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_symbols, value))
    return set()


def _union(saved: tuple[SavedSet, ...]) -> SavedSet:
    if len(saved) == 1:
        return saved[0]
    tensors: dict[Value, SavedValue] = {}
    sizes: dict[str, Any] = {}
    for one in saved:
        for value in one.tensors:
            tensors.setdefault(value.value, value)
        sizes.update(dict(one.sizes))
    return SavedSet(tuple(tensors.values()), tuple(sizes.items()))

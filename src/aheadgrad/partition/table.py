"""What there is to choose from when a joint program is split: ops with their kinds, values with their bytes.

One pass over the tape. Views count as what they are views of: that is what lies in memory. The forward's half
is what the outputs need; the backward's is what rests on tangents; anything else may run on either side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aheadgrad.joint.level import Gradients
from aheadgrad.options import Policy
from aheadgrad.partition.policies import wish_for
from aheadgrad.program.cut import Cutter
from aheadgrad.program.values import Op, Region, Value, map_leaves
from aheadgrad.torchlayer.costs import Kind, flops_of, kind_of
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import Number


@dataclass(frozen=True, eq=False)
class Table:
    """`ahead` are the ops that run in the forward in any case, `fixed` those that cannot run later: they read
    what the call overwrites. `once`: there is this one backward and never another, so that the forward may
    compute something for it that is no value of the function's own. `seen` are inputs and outputs that eager
    does not save: their owner may change them, so nothing is computed from them again. `results` are in
    somebody else's hands: what the backward needs of them is saved, not computed again, so that changes are
    noticed at any order. `given` are values that are there in any case, beside inputs."""

    cutter: Cutter
    gradients: Gradients
    ahead: Collection[int]
    fixed: Collection[int] = ()
    once: bool = False
    seen: Collection[Value] = ()
    results: Collection[Value] = ()
    policies: tuple[Policy, ...] = ()
    given: Collection[Value] = ()

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        return self.cutter.tape.ops

    @cached_property
    def kinds(self) -> list[Kind]:
        found = [kind_of(op.target) for op in self.ops]
        for made in self.cutter.tape.makers.values():
            for i in made:
                found[i] = Kind.NEVER  # a size that values decide
        for i, op in enumerate(self.ops):
            if found[i] is Kind.RANDOM and op.kwargs.get("generator") is not None:
                found[i] = Kind.NEVER  # it has a generator of its own
        for i in (*self.fixed, *(root.op for root in map(self.root, self.results) if root.op is not None)):
            found[i] = Kind.NEVER
        return found

    @cached_property
    def _roots(self) -> dict[Value, Value]:
        return {}

    def root(self, value: Value) -> Value:
        """What a value is a view of."""
        found = self._roots.get(value)
        if found is None:
            source = self.cutter.source(value)
            op = None if source in self.given else self.cutter.tape.of(source)
            viewed = None if op is None or source.op in self.fixed else op.viewed
            found = self._roots[value] = source if viewed is None else self.root(viewed)
        return found

    def maker(self, root: Value) -> int | None:
        """The number of the op that makes it; None if it is there in any case."""
        return None if root in self.given else root.op

    def reads(self, op: Op) -> Iterator[Value]:
        """The roots that an op reads, each once."""
        return iter({self.root(v): None for v in op.uses})

    def flops(self, i: int) -> int:
        """The arithmetic of one op, where it counts."""
        if self.kinds[i] is not Kind.MATRIX:
            return 0
        op = self.ops[i]
        args, out = map_leaves(op.args, _size), map_leaves(op.out, _size)
        return flops_of(op.target, args, map_leaves(op.kwargs, _size), out)

    @cached_property
    def again(self) -> set[int]:
        """The ops that their author wants to run again."""
        regions = ((i, op.region) for i, op in enumerate(self.ops) if op.region and op.phase == "forward")
        found = {i for i, region in regions if not region.saves}
        found |= {i for i, wish in self.wishes.items() if wish.must and not wish.saves}
        return {i for i in found if self.kinds[i] is not Kind.NEVER}

    @cached_property
    def wishes(self) -> dict[int, Policy]:
        """The policies of the user's, by op."""
        if not self.policies:
            return {}
        found = {i: wish_for(op, self.policies) for i, op in enumerate(self.ops)}
        return {i: wish for i, wish in found.items() if wish is not None}

    @cached_property
    def outside(self) -> set[Value]:
        """Roots of such ops that others than their own region read in the backward: regions end there."""
        found: set[Value] = set()
        for i, op in enumerate(self.ops) if self.again else ():
            if op.phase != self.gradients.phase and i not in self.again:
                continue
            for root in self.reads(op):
                if root.op in self.again and _other_region(self.ops[root.op].region, op.region):
                    found.add(root)
        return found

    @cached_property
    def avoided(self) -> set[Value]:
        """The roots of what is in somebody else's hands, but for what the backward itself reads."""
        return {self.root(v) for v in self.seen} - self.needs.keys()

    @cached_property
    def constant(self) -> set[int]:
        """The ops that rest on no input: ranges, masks of a certain size."""
        found: set[int] = set()
        for i, op in enumerate(self.ops):
            if self.kinds[i] <= Kind.FUSES and all(v.op in found for v in op.uses):
                found.add(i)
        return found

    @cached_property
    def written(self) -> set[Value]:
        """The roots that the forward writes to memory even where neighbours are fused into one kernel: other
        kernels make them or read them, or lie between their op and a reader."""
        found: set[Value] = set()
        depths: dict[int, int] = {}  # how many such kernels lie one behind the other
        for i, op in enumerate(self.ops):
            if i not in self.ahead:
                continue
            alone = self.kinds[i] > Kind.FUSES
            deep = {root: depths.get(root.op, 0) for root in self.reads(op) if root.op is not None}
            depths[i] = max(deep.values(), default=0) + alone
            found.update(root for root in deep if alone or depths[i] > deep[root])
            found.update(op.values if alone else ())
        return found

    @cached_property
    def tangents(self) -> set[Value]:
        return {v for t in self.gradients.tangents if t is not None for v in values_of(t)}

    @cached_property
    def later(self) -> set[int]:
        """The ops of the backward: those that rest on tangents, if only one backward is to be thought of."""
        tangents, found = self.tangents, set[int]()
        for i, op in enumerate(self.ops):
            if (not self.once and op.phase == self.gradients.phase) or any(
                v.op in found if v.op is not None else v in tangents for v in op.uses
            ):
                found.add(i)
        return found

    @cached_property
    def needs(self) -> dict[Value, list[Op]]:
        """The roots that the backward takes, each with the ops there that read it."""
        found: dict[Value, list[Op]] = {self.root(v): [] for v in self.gradients.component.keeps}
        reached: set[int] = set()
        todo: list[int] = []

        def take(value: Value, by: list[Op]) -> None:
            value = self.cutter.source(value)
            if value.op in self.later:
                if value.op not in reached:
                    reached.add(value.op)
                    todo.append(value.op)
            elif value not in self.tangents:
                found.setdefault(self.root(value), []).extend(by)

        for gradient in self.gradients.grads:
            for value in values_of(gradient):
                if type(value) is Value:
                    take(value, [])
        for i, op in enumerate(self.ops):
            if op.keep and op.phase == self.gradients.phase:
                reached.add(i)
                todo.append(i)
        while todo:
            op = self.ops[todo.pop()]
            for value in op.uses:
                take(value, [op])
        return found

    def why_kept(self, i: int) -> str:
        """Why the results of an op are not computed again."""
        if i in self.wishes and self.wishes[i].saves:
            return "a policy saves it"
        return _REASONS.get(self.kinds[i], "less to keep than to compute again")


def _other_region(made: Region | None, used: Region | None) -> bool:
    return made is not None and (used is None or used.number != made.number)


def _size(leaf: Any) -> Any:
    """A value as its size, in numbers of the recorded call."""
    if type(leaf) is Value:
        return tuple(map(_size, leaf.type.size))
    return leaf.hint or 0 if type(leaf) is Number else leaf


_REASONS = {
    Kind.SWEEPS: "a kernel of its own",
    Kind.MATRIX: "too much arithmetic to do twice",
    Kind.RANDOM: "random",
    Kind.NEVER: "must not run twice",
}

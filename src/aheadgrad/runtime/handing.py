"""A backward hands over to the one below it that comes next anyway (`recording/meeting` has the reason).

A node of the next order may hand over if the engine is going to run the nodes below it, in this very
backward, and has not run them yet. What it hands over waits at their lifetimes.

With a backend that fuses, a backward that gives nothing else (but gradients of leaves that the nearest of
those below gives, too) waits itself, and runs as a part of the first one that takes something from it
(`postponed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from aheadgrad.backends.contract import Executable
from aheadgrad.emit.script import Script
from aheadgrad.joint.level import Component, Level
from aheadgrad.partition.saved import SavedSet
from aheadgrad.program.expanded_tangents import takes
from aheadgrad.program.joined import Joined, joined
from aheadgrad.program.program import Program
from aheadgrad.runtime.backward import laid_out
from aheadgrad.runtime.freeing import Lifetime, place_of
from aheadgrad.runtime.postponed import Later, Postponed, settled
from aheadgrad.torchlayer.autocast import any_autocast
from aheadgrad.torchlayer.autograd import running_backward
from aheadgrad.torchlayer.dispatch import transform_level
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.transforms import is_batched
from aheadgrad.torchlayer.wanted import Wanted, will_run

Passed = list[tuple[int, Any]]
"""Of each gradient the number of the target, and the gradient, or where it will be."""
Ends = tuple[tuple[int, int], ...]
"""Of each end how many orders below it lies, and its place there."""


class Way(NamedTuple):
    """One backward that takes and hands over: its program takes what waits at `numbers` last. `hands` has, by
    how many orders below, the places there and which results they get; the nearest that takes something is
    so many orders `below`. It `gives` gradients of these targets. `lay_out` is for what was handed over in
    another layout. `lines`: all of it as one function, where nothing is to be fused with anything."""

    program: Program
    executable: Executable
    numbers: tuple[int, ...]
    hands: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    below: int
    gives: frozenset[int]
    lay_out: Callable[[list[Any]], None] | None
    lines: Callable[..., list[Any]] | None


class Handing:
    """The backwards of one node that take what is handed to it, or hand on, or both."""

    def __init__(
        self, level: Level, component: Component, saved: SavedSet, backward: Any, steps: Any
    ) -> None:
        self.level = level
        self.component = component
        self.saved = saved
        self.backward = backward
        self.steps = steps
        self.made: dict[Any, Way | None] = {}
        self.joined: dict[Any, tuple[Joined, Executable] | None] = {}
        self.places = {t.key: k for k, t in enumerate(component.targets)}
        self.is_met = False  # has there been a backward of higher order, which may hand over to this one?
        self.laid_out = level.options.layouts == 1
        self.possible = not (level.lays_out or level.veiled or saved.sizes)
        self.possible &= not callable(level.options.partition) and level.options.any_order
        self.possible &= not any(c.has_boundary for c in level.components)

    def run(self, node: Any, tangents: list[Tensor | None], wanted: Wanted) -> list[Any] | None:
        """The gradients, where something was or can be handed over: the tangents are used up then. None
        otherwise."""
        own: Lifetime | None = node.lifetime
        below: Lifetime | None = node.below
        task = running_backward()
        handed, passed = own.take(task) if own is not None else (None, None)
        plain = transform_level() is None
        for t in tangents:
            if t is not None and (t.__class__ is not Tensor or is_batched(t)):
                plain = False
        hands = _first_taking(below, task) if plain and below is not None else 0
        if not handed and not hands and not passed:
            return None
        handed, passed = handed or {}, passed or []
        if not plain:
            return self._one_after_the_other(node, tangents, handed, passed, wanted)
        if self.laid_out:
            tangents[:] = map(laid_out, tangents, self.component.expected)
        pattern = tuple([t if t is None else t.stride() for t in tangents])
        numbers = tuple(handed)
        key = pattern, wanted, numbers, hands
        way = self.made.get(key) or (self._find(below, key) if hands else None)
        if way is None:
            if not handed and not passed:
                return None
            way = self._find(below, (pattern, wanted, numbers, 0))
            if way is None:
                return self._one_after_the_other(node, tangents, handed, passed, wanted)
        if way.lines is not None and not passed and Later not in map(type, handed.values()):
            return way.lines(node, task, handed, tangents)
        return self._go(way, node, task, handed, passed, tangents)

    def _go(
        self,
        way: Way,
        node: Any,
        task: int,
        handed: dict[int, Tensor | Later],
        passed: Passed,
        tangents: list[Tensor | None],
    ) -> list[Any]:
        saved = node.saved_tensors[: len(self.saved.tensors)] if self.saved.tensors else ()
        node.maybe_clear_saved_tensors()
        args = [*saved, *[t for t in tangents if t is not None]]
        tangents.clear()
        given = [handed.pop(n) for n in way.numbers]
        gives = way.gives.union(j for j, _ in passed)
        todo = self._begun(way, args, given, passed, saved)
        del saved, args, given
        count = len(self.component.targets)
        if way.hands and way.lines is None:
            next_one = _lifetime(node, way.below)
            passes = None if passed else self._passes(gives, node, next_one)
            if passes is not None:
                todo.wait()
                for depth, places in way.hands:
                    _lifetime(node, depth).hand(task, {place: Later(todo, k) for place, k in places})
                if passes:
                    next_one.pass_on(task, [(j, Later(todo, k)) for k, j in passes])
                return [None] * count
        results = todo.settle()
        for depth, places in way.hands:
            _lifetime(node, depth).hand(task, {place: results[k] for place, k in places})
        grads = results[:count]
        results[:count] = [None] * count  # others may still be waiting for the rest
        for j, value in passed:
            grads[j] = _sum(settled(value), grads[j])
        return grads

    def _passes(self, gives: frozenset[int], node: Any, next_one: Lifetime) -> list[tuple[int, int]] | None:
        """Gradients that the next node can add to its own, as the engine would: those of the same leaves.
        None if it cannot take all of them."""
        to, found = next_one.node(), []
        leaves, others = node.leaves or (), () if to is None else to.leaves or ()
        if gives and not (leaves and others):
            return None
        for k in sorted(gives):
            j = next_one.handing.places.get(self.component.targets[k].key)
            if j is None or leaves[k] is None or leaves[k] is not others[j]:
                return None
            found.append((k, j))
        return found

    def _begun(
        self,
        way: Way,
        args: list[Any],
        given: list[Tensor | Later],
        passed: Passed,
        saved: Sequence[Tensor],
    ) -> Postponed:
        """What is to run: the backward by itself, or with another one that has been waiting for it. Then what
        was passed on is added."""
        firsts = dict.fromkeys(v.found().of for v in (*given, *(v for _, v in passed)) if type(v) is Later)
        first = next((p for p in firsts if p.results is None), None)
        if first is not None and all(type(v) is Later and v.found().of is first for _, v in passed):
            given[:] = [v if type(v) is Later and v.found().of is first else settled(v) for v in given]
            whole = self._with(first, way, args, given, passed, saved)
            if whole is not None:
                passed.clear()
                return whole
        found = list(map(settled, given))
        given.clear()
        if found and way.lay_out is not None:
            way.lay_out(found)
        return Postponed(way.program, way.executable.call, [*args, *found], saved)

    def _with(
        self,
        first: Postponed,
        way: Way,
        args: list[Any],
        given: list[Tensor | Later],
        passed: Passed,
        saved: Sequence[Tensor],
    ) -> Postponed | None:
        start = len(args)
        wires = [(v.found().number, start + i) for i, v in enumerate(given) if type(v) is Later]
        sums = [(v.found().number, j) for j, v in passed if type(v) is Later]
        if len(wires) < len(given) and way.lay_out is not None:
            return None
        key = first.program, way.program, tuple(wires), tuple(sums)
        if key not in self.joined:
            with RECORDING:
                made = joined(first.program, way.program, wires, sums)
                run = None if made is None else self.steps.executable(made.program)
                self.joined[key] = None if made is None or run is None else (made, run)
        known = self.joined[key]
        if known is None:
            return None
        made, run = known
        rest = [*args, *given]
        watched = [*first.saved, *saved]
        whole = Postponed(made.program, run.call, [*first.begin(), *(rest[i] for i in made.taken)], watched)
        first.into = whole, made.kept
        return whole

    def _one_after_the_other(
        self,
        node: Any,
        tangents: list[Tensor | None],
        handed: dict[int, Tensor | Later],
        passed: Passed,
        wanted: Wanted,
    ) -> list[Any]:
        """What the tangents give, and what was handed over."""
        saved = list(node.saved_tensors[: len(self.saved.tensors)]) if self.saved.tensors else []
        way = self._find(None, (self._nothing, None, tuple(handed), 0))
        assert way is not None
        grads = self._go(way, node, 0, handed, passed, [*self._nothing])
        if any(t is not None for t in tangents):
            others = self.backward.run(None, saved, tangents, wanted)
            grads = list(map(_sum, others, grads))
        return [g if wanted is None or wanted[k] else None for k, g in enumerate(grads)]

    @property
    def _nothing(self) -> tuple[None, ...]:
        return (None,) * len(self.component.exits)

    def _find(self, below: Lifetime | None, key: tuple[Any, ...]) -> Way | None:
        """The backward; None if there is none, or nobody below could go on. In which order things were handed
        over does not matter to it."""
        way = self.made.get(key)
        if way is None and key not in self.made:
            pattern, wanted, numbers, hands = key
            if numbers != (in_order := tuple(sorted(numbers, key=lambda n: (place_of(n), n)))):
                way = self.made[key] = self._find(below, (pattern, wanted, in_order, hands))
                return way
            with RECORDING:
                handed = tuple(map(place_of, numbers))
                found = self.steps.handing(self.component, self.saved, pattern, wanted, handed, hands=hands)
                if found is not None and (not hands or _all_taken(below, found[1])):
                    way = self._way(pattern, numbers, *found)
                self.made[key] = way
        return way

    def _way(self, pattern: tuple[Any, ...], numbers: tuple[int, ...], program: Program, ends: Ends) -> Way:
        count = len(self.component.targets)
        results = program.results
        there = [(d, place, count + k) for k, (d, place) in enumerate(ends) if results[count + k] is not None]
        depths = sorted({depth for depth, _, _ in there})
        hands = tuple((d, tuple([(place, k) for e, place, k in there if e == d])) for d in depths)
        gives = frozenset(k for k, g in enumerate(results[:count]) if g is not None)
        run = self.steps.executable(program)
        inline = run.inline is not None
        lay_out = partial(_lay_out, program, len(numbers), {}) if numbers and inline else None
        way = Way(program, run, numbers, hands, depths[0] if depths else 0, gives, lay_out, None)
        return way._replace(lines=self._written(way, pattern)) if inline else way

    def _written(self, way: Way, pattern: tuple[Any, ...]) -> Callable[..., list[Any]]:
        """`backward(node, task, handed, tangents)`, which hands over what comes out at the ends."""
        script = Script("handing_backward")
        saved = [f"s{k}" for k in range(len(self.saved.tensors))]
        tangents = [f"t{k}" for k, there in enumerate(pattern) if there is not None]
        handed = [f"h{k}" for k in range(len(way.numbers))]
        if saved:
            script.line(f"{', '.join(saved)}, = node.saved_tensors[:{len(saved)}]")
        for place, number in zip(handed, way.numbers, strict=True):
            script.line(f"{place} = handed.pop({number})")
        script.line(f"{''.join(f't{k}, ' for k in range(len(pattern)))}= tangents")
        script.line("tangents.clear()")
        script.line("node.maybe_clear_saved_tensors()")
        if way.lay_out is not None:
            script.line(f"handed = [{', '.join(handed)}]")
            script.line(f"{script.names.name(way.lay_out, 'lay_out')}(handed)")
            script.line(f"{', '.join(handed)}, = handed")
            script.line("del handed")
        assert way.executable.inline is not None
        results = way.executable.inline(script, [*saved, *tangents, *handed], keep_places=False)
        for depth, places in way.hands:
            here = ", ".join(f"{place}: {results[k]}" for place, k in places)
            script.line(f"node.below{'.below' * depth}.hand(task, {{{here}}})")
        script.line(f"return [{', '.join(results[: len(self.component.targets)])}]")
        return script.function("node, task, handed, tangents")[0]

    def takes(self, numbers: tuple[int, ...]) -> bool:
        """Can it take tangents at these places? Whether all at once or not, and whatever comes with them."""
        return self._find(None, (self._nothing, None, numbers, 0)) is not None


def _lay_out(program: Program, count: int, known: dict[Any, bool], given: list[Any]) -> None:
    """What is handed over in other layouts than it was recorded in is copied where the program needs that."""
    values: list[Any] = [p.value for p in program.inputs[-count:]]
    strides = tuple([t.stride() for t in given])
    fits = known.get(strides)
    if fits is None:
        usual = all(s == v.type.stride for s, v in zip(strides, values, strict=True))
        fits = known[strides] = usual or takes(program, dict(zip(values, strides, strict=True)))
    if not fits:
        given[:] = [laid_out(t, v.type.stride) for t, v in zip(given, values, strict=True)]


def _lifetime(node: Any, depth: int) -> Any:
    at = node.below
    for _ in range(depth):
        at = at.below
    return at


def _first_taking(below: Lifetime, task: int) -> int:
    """How many orders below the nearest is that can take what is handed over; 0 if it must not be."""
    first, at = 1, below
    while (node := at.node()) is None:  # nobody holds its gradients any more: its part is done here
        if at.below is None:
            return 0
        first, at = first + 1, at.below
    while True:
        if node is None or at.ran == task or at.handing is None or not at.handing.possible:
            return 0
        if not will_run(node):
            return 0
        if at.below is None:
            return 0 if any_autocast() else first
        at = at.below
        node = at.node()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _all_taken(below: Lifetime | None, ends: Ends) -> bool:
    """Can the nodes below take what would be handed to them?"""
    at: Lifetime | None = below
    for depth in range(max((d for d, _ in ends), default=-1) + 1):
        assert at is not None
        assert at.handing is not None
        numbers = tuple(sorted(number for d, number in ends if d == depth))
        if numbers and not at.handing.takes(numbers):
            return False
        at = at.below
    return True

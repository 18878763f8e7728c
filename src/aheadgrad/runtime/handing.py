"""A backward hands over to the one below it that comes next anyway (`recording/meeting` has the reason).

A node of the next order may hand over if the engine is going to run the nodes below it, in this very
backward, and has not run them yet. What it hands over waits at their lifetimes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from aheadgrad.backends.contract import Executable
from aheadgrad.emit.script import Script
from aheadgrad.joint.level import Component, Level
from aheadgrad.partition.saved import SavedSet
from aheadgrad.program.expanded_tangents import takes
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Between, Tangent
from aheadgrad.runtime.backward import laid_out
from aheadgrad.runtime.freeing import Lifetime
from aheadgrad.torchlayer.autocast import any_autocast
from aheadgrad.torchlayer.autograd import running_backward
from aheadgrad.torchlayer.dispatch import transform_level
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.transforms import is_batched
from aheadgrad.torchlayer.wanted import Wanted, will_run

Made = Callable[..., list[Any]]
Ends = tuple[tuple[int, int], ...]
"""Of each end how many orders below it lies, and its place there."""


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
        self.made: dict[Any, Made | None] = {}
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
        handed = own.take(task) if own is not None else None
        plain = transform_level() is None
        for t in tangents:
            if t is not None and (t.__class__ is not Tensor or is_batched(t)):
                plain = False
        hands = _first_taking(below, task) if plain and below is not None else 0
        if not handed and not hands:
            return None
        handed = handed or {}
        if not plain:
            return self._one_after_the_other(node, tangents, handed, wanted)
        if self.laid_out:
            tangents[:] = map(laid_out, tangents, self.component.expected)
        pattern = tuple([t if t is None else t.stride() for t in tangents])
        numbers = tuple(handed)
        key = pattern, wanted, numbers, hands
        made = self.made.get(key) or (self._find(below, key) if hands else None)
        if made is None:
            if not handed:
                return None
            made = self._find(below, (pattern, wanted, numbers, 0))
            if made is None:
                return self._one_after_the_other(node, tangents, handed, wanted)
        grads: list[Any] = made(node, task, handed, tangents)
        return grads

    def _one_after_the_other(
        self, node: Any, tangents: list[Tensor | None], handed: dict[int, Tensor], wanted: Wanted
    ) -> list[Any]:
        """What the tangents give, and what was handed over."""
        saved = list(node.saved_tensors[: len(self.saved.tensors)]) if self.saved.tensors else []
        made = self._find(None, (self._nothing, None, tuple(handed), 0))
        assert made is not None
        grads = made(node, 0, handed, [*self._nothing])
        if any(t is not None for t in tangents):
            others = self.backward.run(None, saved, tangents, wanted)
            grads = list(map(_sum, others, grads))
        return [g if wanted is None or wanted[k] else None for k, g in enumerate(grads)]

    @property
    def _nothing(self) -> tuple[None, ...]:
        return (None,) * len(self.component.exits)

    def _find(self, below: Lifetime | None, key: tuple[Any, ...]) -> Made | None:
        """The backward; None if there is none, or nobody below could go on. In which order things were handed
        over does not matter to it."""
        made = self.made.get(key)
        if made is None and key not in self.made:
            pattern, wanted, numbers, hands = key
            if numbers != (in_order := tuple(sorted(numbers, key=lambda n: (_place(n), n < 0)))):
                made = self.made[key] = self._find(below, (pattern, wanted, in_order, hands))
                return made
            with RECORDING:
                handed = tuple(map(_place, numbers))
                found = self.steps.handing(self.component, self.saved, pattern, wanted, handed, hands=hands)
                if found is not None and (not hands or _all_taken(below, found[1])):
                    made = self._written(pattern, numbers, *found)
                self.made[key] = made
        return made

    def _written(
        self,
        pattern: tuple[Any, ...],
        numbers: tuple[int, ...],
        run: Executable,
        ends: Ends,
        program: Program,
    ) -> Made:
        """`backward(node, task, handed, tangents)`, which hands over what comes out at the ends."""
        script = Script("handing_backward")
        saved = [f"s{k}" for k in range(len(self.saved.tensors))]
        tangents = [f"t{k}" for k, there in enumerate(pattern) if there is not None]
        handed = [f"h{k}" for k in range(len(numbers))]
        if saved:
            script.line(f"{', '.join(saved)}, = node.saved_tensors[:{len(saved)}]")
        for k, number in enumerate(numbers):
            script.line(f"h{k} = handed.pop({number})")
        script.line(f"{''.join(f't{k}, ' for k in range(len(pattern)))}= tangents")
        script.line("tangents.clear()")
        script.line("node.maybe_clear_saved_tensors()")
        count = len(self.component.targets)
        results = [f"r{k}" for k in range(count + len(ends))]
        places = [*saved, *tangents, *handed]
        if run.inline is not None:
            if handed:
                _lay_out(script, program, handed)
            found = run.inline(script, places, keep_places=False)
            call = "".join(f"{f}, " for f in found)
            absent = {k for k, f in enumerate(found[count:]) if f == "None"}
        else:
            script.line(f"args = [{', '.join(places)}]")
            script.line(f"del {', '.join(places)}")
            call = f"{script.names.name(run.call, 'backward')}(args)"
            absent = None
        script.line(f"{''.join(f'{r}, ' for r in results)}= {call}")
        for depth in sorted({depth for depth, _ in ends}):
            here = [(n, k) for k, (d, n) in enumerate(ends) if d == depth and k not in (absent or ())]
            given = f"{{{', '.join(f'{n}: r{count + k}' for n, k in here)}}}"
            if absent is None:
                given = f"{script.names.name(_present, 'present')}({given})"
            script.line(f"node.below{'.below' * depth}.hand(task, {given})")
        script.line(f"return [{', '.join(results[:count])}]")
        return script.function("node, task, handed, tangents")[0]

    def takes(self, numbers: tuple[int, ...]) -> bool:
        """Can it take tangents at these places? Whether all at once or not, and whatever comes with them."""
        return self._find(None, (self._nothing, None, numbers, 0)) is not None


def _lay_out(script: Script, program: Program, handed: list[str]) -> None:
    """What is handed over in other layouts than it was recorded in is copied where the program needs that."""
    values = [p.value for p in program.inputs if type(p.slot) is Tangent and type(p.slot.of) is Between]
    fits = {tuple([v.type.stride for v in values])}
    others = set[Any]()

    def laid(*given: Any) -> Any:
        strides = tuple([t.stride() for t in given])
        if strides not in others:
            if takes(program, dict(zip(values, strides, strict=True))):
                fits.add(strides)
                return given
            others.add(strides)
        return [laid_out(t, v.type.stride) for t, v in zip(given, values, strict=True)]

    strides = "".join(f"{h}.stride(), " for h in handed)
    with script.block(f"if ({strides}) not in {script.names.name(fits, 'fits')}:"):
        script.line(f"{', '.join(handed)}, = {script.names.name(laid, 'laid')}({', '.join(handed)})")


def _place(number: int) -> int:
    """The place of something that waits (see `Lifetime.hand`)."""
    return max(number, ~number)


def _present(given: dict[int, Tensor | None]) -> dict[int, Tensor]:
    return {place: t for place, t in given.items() if t is not None}


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

"""A backward hands over to the one below it that comes next anyway (`recording/handing` has the reason).

A node of the next order may hand over if the engine is going to run the nodes below it, in this very
backward, and has not run them yet. What it hands over waits at their lifetimes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from aheadgrad.joint.level import Component, Level
from aheadgrad.partition.saved import SavedSet
from aheadgrad.runtime.backward import laid_out
from aheadgrad.runtime.freeing import Lifetime
from aheadgrad.torchlayer.autocast import autocast_state
from aheadgrad.torchlayer.autograd import running_backward
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.transforms import is_batched
from aheadgrad.torchlayer.wanted import Wanted, will_run

Made = tuple[Callable[[list[Any]], list[Any]], tuple[tuple[int, int], ...]]


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
        self.possible = not (level.lays_out or level.veiled or saved.sizes)
        self.possible &= level.options.partition == "default" and level.options.any_order
        self.possible &= not any(c.has_boundary for c in level.components)

    def run(self, node: Any, tangents: tuple[Tensor | None, ...], wanted: Wanted) -> list[Any] | None:
        """The gradients, where something was or can be handed over; None otherwise."""
        own: Lifetime | None = getattr(node, "lifetime", None)
        below: Lifetime | None = getattr(node, "below", None)
        task = running_backward()
        handed = own.take(task) if own is not None else {}
        hands = below is not None and self._may_hand(below, task, tangents)
        if not handed and not hands:
            return None
        if self.level.options.layouts == 1:
            tangents = tuple(map(laid_out, tangents, self.component.expected))
        pattern = tuple(None if t is None else t.stride() for t in tangents)
        numbers = tuple(sorted(handed))
        made = self._find(node, (pattern, wanted, numbers, True)) if hands else None
        if made is None and not handed:
            return None
        if made is None:
            made = self._find(node, (pattern, wanted, numbers, False))
        saved = list(node.saved_tensors[: len(self.saved.tensors)]) if self.saved.tensors else []
        if made is None:
            return self._one_after_the_other(saved, tangents, handed, wanted)
        saved += (t for t in tangents if t is not None)
        saved += (handed.pop(number) for number in numbers)
        node.maybe_clear_saved_tensors()
        return _hand_over(node, task, made, saved)

    def _may_hand(self, below: Lifetime, task: int, tangents: tuple[Tensor | None, ...]) -> bool:
        if autocast_state() is not None or not all(t is None or type(t) is Tensor for t in tangents):
            return False
        if any(t is not None and is_batched(t) for t in tangents):
            return False
        at: Lifetime | None = below
        while at is not None:
            node = at.node()
            if node is None or at.ran == task or at.handing is None or not at.handing.possible:
                return False
            if not will_run(node):
                return False
            at = at.below
        return True

    def _one_after_the_other(
        self, saved: list[Any], tangents: tuple[Tensor | None, ...], handed: dict[int, Tensor], wanted: Wanted
    ) -> list[Any]:
        """What the tangents give, and what was handed over."""
        numbers = tuple(sorted(handed))
        made = self._find(None, (self._nothing, None, numbers, False))
        assert made is not None
        grads = made[0]([*saved, *(handed[number] for number in numbers)])
        if any(t is not None for t in tangents):
            others = self.backward.run(None, saved, tangents, wanted)
            grads = list(map(_sum, others, grads))
        return [g if wanted is None or wanted[k] else None for k, g in enumerate(grads)]

    @property
    def _nothing(self) -> tuple[None, ...]:
        return (None,) * len(self.component.exits)

    def _find(self, node: Any, key: tuple[Any, ...]) -> Made | None:
        """The program, and where its ends are; None if there is none, or nobody below could go on."""
        if key not in self.made:
            with RECORDING:
                pattern, wanted, numbers, hands = key
                made = self.steps.handing(self.component, self.saved, pattern, wanted, numbers, hands=hands)
                if made is not None and hands and not _all_taken(node.below, made[1]):
                    made = None
                self.made[key] = made
        return self.made[key]

    def takes(self, numbers: tuple[int, ...]) -> bool:
        """Can it take tangents at these places? Whether all at once or not, and whatever comes with them."""
        return self._find(None, (self._nothing, None, numbers, False)) is not None


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _hand_over(node: Any, task: int, made: Made, args: list[Any]) -> list[Any]:
    """Runs a program, hands over what comes out at its ends and returns the rest."""
    run, ends = made
    found = run(args)
    count = len(found) - len(ends)
    for (depth, number), tangent in zip(ends, found[count:], strict=True):
        if tangent is not None:
            at = node.below
            for _ in range(depth):
                at = at.below
            at.hand(task, number, tangent)
    return found[:count]


def _all_taken(below: Lifetime, ends: tuple[tuple[int, int], ...]) -> bool:
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

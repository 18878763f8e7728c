"""Freeing across orders: a backward through gradients is also a backward of the call they belong to.

In eager such a backward goes on through the nodes of the forward and frees them. Ours need not go
there, since the node of the next order leads to the inputs itself; but it must not make a difference
to a later backward through the same call.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from aheadgrad.runtime.postponed import Later, settled
from aheadgrad.torchlayer.autograd import (
    at_end_of_backward,
    clear_saved,
    keeps_graph,
    number_of,
    running_backward,
)
from aheadgrad.torchlayer.wanted import will_run

BACKWARD_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have "
    "already been freed). Specify retain_graph=True if you need to backward through the graph a second time."
)


_MOST_WAITING = 64
_PLACES = 1 << 16
NOT_YET, BEFORE = -1, -2


class Lifetime:
    """Whether a node's call has had its backward; outlives the node."""

    freed = NOT_YET  # or the backward that frees it
    handing: Any = None  # how its backward takes what others hand over (`handing`)
    ran = -1  # the last backward that it ran in
    waiting: dict[int, dict[int, Any]] | None = None  # by backward and place: what was handed over
    passed: dict[int, list[tuple[int, Any]]] | None = None  # by backward: gradients to add to

    def __init__(self, node: Any) -> None:
        self.node = weakref.ref(node)
        self.number = number_of(node)
        self.below: Lifetime | None = node.below

    def hand(self, task: int, given: dict[int, Any]) -> None:
        """Tangents by their place, for the node's backward, which is still to come. What comes to a place
        where something waits has a number of its own (see `place_of`), and is added by that backward; so is
        a third, if one program makes all of them."""
        waiting = self.waiting
        if waiting is None:
            self.waiting = {task: given}
            return
        here = waiting.get(task)
        if here is None:
            if len(waiting) >= _MOST_WAITING:
                waiting.pop(min(waiting))  # of a backward that ended with an error
            waiting[task] = given
            return
        for place, t in given.items():
            number = place
            while number in here:
                number += _PLACES
            if number >= place + 2 * _PLACES and not _of_one(t, here, place):
                number -= _PLACES
                here[place] = settled(here[place]) + settled(here[number])
            here[number] = t

    def pass_on(self, task: int, gradients: list[tuple[int, Any]]) -> None:
        """Gradients of leaves, by the numbers of the node's targets: it adds its own to them."""
        if self.passed is None:
            self.passed = {}
        elif len(self.passed) >= _MOST_WAITING:
            self.passed.pop(min(self.passed))
        self.passed.setdefault(task, []).extend(gradients)

    def take(self, task: int) -> tuple[dict[int, Any] | None, list[tuple[int, Any]] | None]:
        """What was handed over, and passed on."""
        self.ran = task
        handed = self.waiting.pop(task, None) if self.waiting else None
        return handed, self.passed.pop(task, None) if self.passed else None


def place_of(number: int) -> int:
    """The place of something that waits."""
    return number % _PLACES


def _of_one(new: Any, here: dict[int, Any], place: int) -> bool:
    if type(new) is not Later:
        return False
    whole, others = new.found().of, [t for number, t in here.items() if place_of(number) == place]
    return all(type(t) is Later and t.found().of is whole for t in others)


def lifetime_of(node: Any) -> Lifetime:
    known: Lifetime | None = node.lifetime
    if known is None:
        known = node.lifetime = Lifetime(node)
    return known


def free_below(node: Any) -> None:
    """At the start of a backward through gradients: the call they belong to is used up by it."""
    at: Lifetime | None = node.below
    task = running_backward()
    if node.below.freed not in (NOT_YET, task):
        raise RuntimeError(BACKWARD_TWICE)
    if keeps_graph():
        return
    others = False
    while at is not None:
        at.freed = task
        held = at.node()
        others = others or (held is not None and at.ran != task and not will_run(held))
        at = at.below
    if others:  # which this backward does not get to
        at_end_of_backward(functools.partial(_free, node.below))


def _free(lifetime: Lifetime | None) -> None:
    while lifetime is not None:
        node = lifetime.node()
        if node is not None:
            clear_saved(node)
            watch = getattr(node, "watch", None)
            if watch is not None:
                node.watch = None, watch[1]
        lifetime = lifetime.below

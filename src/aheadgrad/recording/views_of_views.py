"""Returned views that were taken from other returned views: in

    v = h[1:]
    return h, v, v[1:]

the last is made from `v` again, not from `h`, so that `autograd.grad` finds the way from one to the other.
Autograd knows whether there is one: after a write to `h` each view leads to `h` itself. So is what was taken
from a view that had changed its shape in place: that is done once, as it moves the version counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aheadgrad.facts.facts import OutputFacts, ViewOf
from aheadgrad.recording.walks import edge_of, walk


def taken_through(facts: Sequence[OutputFacts], outputs: Sequence[Any]) -> list[OutputFacts]:
    views = {j: f for j, f in enumerate(facts) if isinstance(f, ViewOf) and (f.plain or _reshaped(f))}
    views = {j: f for j, f in views.items() if outputs[j].grad_fn is not None and f.recipe.geometry is None}
    found = list(facts)
    for j, fact in views.items() if len(views) > 1 else ():
        behind = walk(edge_of(outputs[j])).edges
        steps = fact.recipe.steps
        passed = [
            (len(other.recipe.steps), k)
            for k, other in views.items()
            if k != j
            and other.root == fact.root
            and len(other.recipe.steps) < len(steps)
            and other.recipe.steps == steps[: len(other.recipe.steps)]
            and edge_of(outputs[k]) in behind
        ]
        if passed:
            found[j] = replace(fact, through=max(passed)[1])
    return found


def _reshaped(fact: ViewOf) -> bool:
    """Is it unusual only in that its shape, or that of what it is taken from, was changed in place?"""
    steps = tuple(replace(step, in_place=False) for step in fact.recipe.steps)
    return replace(fact, recipe=replace(fact.recipe, steps=steps)).plain

"""A graph and what the transforms of `torch.func` make of it, each compiled as a function of its own.

    derived = Derived(graph, options)               # f
    derived.vmap((0, None), "error")                # the same over a batch
    derived.vjp((0,), (0,)).vmap((0, None, 0), ...) # gradients of each sample: one program

Each is a function of flat tensors, made of the graph with torch's own transforms and recorded by tracing:
there is nothing of Python in it that could change. A call under transforms is taken apart, level by level
(`frontends/transform_levels`), until plain tensors are left for one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import Facts, Fresh, FreshRoot, IsRoot, ViewOf
from aheadgrad.frontends.guards import Guarded
from aheadgrad.frontends.trace import TracedFunction
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.torchlayer.dispatch import dual_level, duals_hidden, is_random
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.functorch_levels import is_batched_here

Run = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Allowed:
    """What a function may do besides computing new tensors: draw random numbers, where nothing runs again for
    a derivative; give results that share memory, as gradients do."""

    random: bool = False
    sharing: bool = False


class Derived:
    """A function of flat operands to a tuple of tensors: the graph itself, or a transform of one."""

    def __init__(
        self, fn: Run, options: Options, name: str, allowed: Allowed, *, duals: bool = False
    ) -> None:
        plain = replace(options, frontend="trace", fullgraph=False, fallback="error")
        self.fn, self.options, self.name, self.allowed, self.duals = fn, options, name, allowed, duals
        self._compiled = _Pure(_Opaque(fn, name), plain, allowed)
        self._made: dict[Any, Derived] = {}
        self.batched: list[bool] = []

    def run(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Of plain tensors, compiled. What cannot be is an error, so that the graph runs instead; not in a
        backward, whose forward has run."""
        try:
            with duals_hidden() if dual_level() >= 0 else nullcontext():
                outs: tuple[Any, ...] = self._compiled(*operands)
        except Exception:
            if not self.allowed.sharing:
                raise
            outs = self.fn(*operands)
        return _apart(outs, operands) if self.duals else outs

    def vmap(self, dims: tuple[int | None, ...], randomness: str) -> Derived:
        """`batched` tells which of its outputs have the batch as their first dimension, once it has run."""
        told: list[bool] = []
        made = self._derive("vmap", (dims, randomness), partial(_vmap, self.fn, dims, randomness, told))
        made.batched = made.fn.args[-1]  # type: ignore[attr-defined]
        return made

    def vjp(self, wanted: tuple[int, ...], present: tuple[int, ...]) -> Derived:
        """Takes tangents of the outputs that are `present` behind the operands; gives wanted gradients."""
        return self._derive(
            "vjp", (wanted, present), partial(_vjp, self.fn, wanted, present), Allowed(sharing=True)
        )

    def jvp(self, moved: tuple[int, ...]) -> Derived:
        """Takes tangents of the operands that are `moved` behind them; gives outputs, then their tangents."""
        return self._derive("jvp", moved, partial(_jvp, self.fn, moved), duals=True)

    def _derive(
        self, kind: str, how: Any, fn: Run, allowed: Allowed | None = None, *, duals: bool = False
    ) -> Derived:
        made = self._made.get((kind, how))
        if made is None:
            name, allowed = f"{kind}({self.name})", allowed or self.allowed
            made = self._made[kind, how] = Derived(fn, self.options, name, allowed, duals=duals)
        return made

    @property
    def entries(self) -> list[Any]:
        """What was compiled of this and of all that is made of it."""
        return [*self._compiled.entries, *(e for made in self._made.values() for e in made.entries)]


def _vmap(fn: Run, dims: tuple[int | None, ...], randomness: str, told: list[bool], *operands: Any) -> Any:
    def each(*some: Any) -> Any:
        outs = fn(*some)
        told[:] = map(is_batched_here, outs)
        return outs

    outs = torch.func.vmap(each, in_dims=dims, randomness=randomness)(*operands)
    return tuple(t if batched else t[0] for t, batched in zip(outs, told, strict=True))


def _vjp(fn: Run, wanted: tuple[int, ...], present: tuple[int, ...], *given: Any) -> Any:
    operands, tangents = given[: len(given) - len(present)], given[len(given) - len(present) :]

    def only(*some: Any) -> Any:
        outs = fn(*_replaced(operands, wanted, some))
        return tuple(outs[k] for k in present)

    back = torch.func.vjp(only, *(operands[k] for k in wanted))[1]
    return back(tuple(tangents))


def _jvp(fn: Run, moved: tuple[int, ...], *given: Any) -> Any:
    operands, tangents = given[: len(given) - len(moved)], given[len(given) - len(moved) :]

    def only(*some: Any) -> Any:
        return fn(*_replaced(operands, moved, some))

    outs = torch.func.jvp(only, tuple(operands[k] for k in moved), tuple(tangents))
    return *outs[0], *outs[1]


def _replaced(operands: Sequence[Any], where: tuple[int, ...], by: Sequence[Any]) -> list[Any]:
    full = list(operands)
    for k, value in zip(where, by, strict=True):
        full[k] = value
    return full


def _apart(outs: tuple[Any, ...], operands: Sequence[Any]) -> tuple[Any, ...]:
    """Tangents that are those given, passed on, may be written to: each gets memory of its own."""
    taken = {storage_key(t) for t in operands if isinstance(t, Tensor)}
    found = []
    for t in outs:
        found.append(t.clone() if storage_key(t) in taken else t)
        taken.add(storage_key(found[-1]))
    return tuple(found)


class _Opaque:
    """A function whose insides nobody has to look at: they do not change."""

    def __init__(self, fn: Run, name: str) -> None:
        self._fn, self.__name__ = fn, name

    def __call__(self, *operands: Any) -> Any:
        return tuple(self._fn(*operands))


class _Pure(TracedFunction):
    """Refuses what does more than compute new tensors, before it is run for the first time."""

    def __init__(self, fn: Any, options: Options, allowed: Allowed) -> None:
        super().__init__(fn, options)
        self._allowed = allowed

    def _record(self, *args: Any) -> Guarded:
        made = super()._record(*args)
        reason = _why_impure(made.entry.joint, self._allowed)
        if reason is not None:
            error = FallbackError(reason)
            error.has_run = True
            raise error
        return made


def _why_impure(joint: Joint, allowed: Allowed) -> str | None:
    facts = joint.facts
    if not all(f.untouched for f in facts.inputs):
        return "a tensor from outside is changed"
    if facts.grad_mode_after is not None:
        return "grad mode is left changed"
    if not allowed.random and any(is_random(op.target) for op in joint.tape.ops):
        return "random numbers are drawn"
    if not allowed.sharing and not _all_fresh(facts):
        return "results share memory with each other or with arguments"
    return None


def _all_fresh(facts: Facts) -> bool:
    roots = [f.root for f in facts.outputs if isinstance(f, IsRoot | ViewOf)]
    own = all(isinstance(facts.roots[r], FreshRoot) and roots.count(r) == 1 for r in roots)
    return own and all(isinstance(f, Fresh | IsRoot | ViewOf) for f in facts.outputs)

"""Runs an export: from the caller's arguments to results, updates and gradients, by its signature alone.

    match      arguments are what the signature says, sizes fit
    forward    the first program, on the tensors that it takes
    updates    arguments and held tensors get their new values, sizes, memory
    outputs    results that share memory are made again from what they share it with
    backward   gradients, by name

Nothing here has a history: gradients are what the programs compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.eager import laid_out
from aheadgrad.errors import InvalidOption
from aheadgrad.export.interpreter import Call, Interpreter
from aheadgrad.export.matching import match, storage_of
from aheadgrad.export.shared_memory import Sharing, Size, update
from aheadgrad.export.signature import Backward, Place, Stage
from aheadgrad.export.trees import build as build_tree
from aheadgrad.program.slots import Saved, SavedSize
from aheadgrad.recording.shared_entrances import whole_storage
from aheadgrad.torchlayer.autocast import autocast_as
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.functorch_levels import kinds, takes_part
from aheadgrad.torchlayer.subclasses import build, parts_of
from aheadgrad.torchlayer.symbols import Number


@dataclass(frozen=True, eq=False)
class Step:
    """What a run with gradients gives: the function's own output, and gradients by name of what they are of
    (None where there is none)."""

    output: Any
    gradients: Mapping[str, Tensor | None]


class Runner:
    """Runs one stage; `calls` run its programs, `state` has the tensors that the export holds."""

    def __init__(self, stage: Stage, state: dict[str, Tensor], calls: Sequence[Call] | None = None) -> None:
        self.programs, self.signature, self.state = stage.programs, stage.signature, state
        self.calls = [Interpreter(p) for p in self.programs] if calls is None else list(calls)
        self.numbers = Interpreter(self.programs[0]).number

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tangents: Sequence[Any] | None = None
    ) -> Step:
        signature = self.signature
        leaves = match(signature, args, kwargs, self.numbers)
        _check_transforms(leaves)
        places = Reached(leaves, self.state)
        self._count(tangents)
        with torch.no_grad(), autocast_as(None):  # casts are in the programs
            inputs = [places[signature.inputs[i]] for i in signature.taken]
            size = self._sizes(leaves)
            sharing = Sharing(signature, places, size)
            sharing.check()
            given = self._given([p.detach() for t in inputs for p in parts_of(t)], size)
            if signature.kind == "joint":
                given += self._tangents(signature.backwards, None, tangents)
            results = self.calls[0](given + self._constants(0))
            leaving, rest = self._leaving(results)
            gradients = self._gradients(leaving, rest, tangents)
            self._update(places, leaving, gradients, size)
            outputs = sharing.outputs(leaving)
            for k in signature.numbers:
                outputs[k] = outputs[k].item()
        if signature.facts.grad_mode_after is not None:
            torch.set_grad_enabled(signature.facts.grad_mode_after)
        self.state.update({name: outputs[k].detach() for name, k in (*signature.made, *signature.renewed)})
        for name in signature.gone:
            del self.state[name]
        return Step(build_tree(signature.returns, iter(outputs[: len(signature.outputs)])), gradients)

    def _given(self, tensors: list[Tensor], size: Size) -> list[Tensor]:
        """In the layout that the program was recorded for."""
        if self.signature.exact_memory:
            return tensors
        found = []
        for t, port in zip(tensors, self.programs[0].inputs, strict=False):
            stride = tuple(size(n) if type(n) is Number else n for n in port.value.type.stride)
            found.append(t if t.stride() == stride else laid_out(t, stride))
        return found

    def _constants(self, k: int) -> list[Tensor]:
        return [self.state[name] for name in self.signature.constants[k]]

    def _sizes(self, leaves: list[Any]) -> Size:
        """What numbers in facts are, in this call."""
        known = {s.symbol: int(leaves[s.argument].shape[s.dimension]) for s in self.signature.sizes}
        return lambda number: self.numbers(number, known)

    def _leaving(self, results: list[Any]) -> tuple[list[Any], list[Any]]:
        """The results of the forward, subclasses put together; and what comes behind them."""
        rest, found = iter(results), []
        for one in self.signature.leaving:
            found.append(next(rest) if one.form is None else build(one.form, rest))
        return found, list(rest)

    def _update(
        self, places: Reached, leaving: list[Any], gradients: dict[str, Tensor | None], size: Size
    ) -> None:
        signature = self.signature
        new, old = dict(signature.updates), dict(signature.old_memory)
        changed = [f for f in signature.facts.inputs if not f.untouched]
        memory = {storage_of(p) for f in changed for p in parts_of(places[signature.place(f.index)])}
        for name, g in gradients.items():
            if g is not None and any(storage_of(p) in memory for p in parts_of(g)):
                gradients[name] = g.clone()
        for fact in changed:
            adopted = None if fact.adopts is None else places[signature.place(fact.adopts)]
            target = places[signature.place(fact.index)]
            value = leaving[new[fact.index]] if fact.index in new else None
            former = leaving[old[fact.index]] if fact.index in old else None
            update(target, fact, value, former, adopted, size)

    # ---- gradients ----------------------------------------------------------------------------

    def _gradients(
        self, leaving: list[Any], rest: list[Any], tangents: Sequence[Any] | None
    ) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        values = iter(rest)
        for k, backward in enumerate(self.signature.backwards):
            if self.signature.kind == "split":
                values = iter(self._backward(k, leaving, rest, tangents))
            for g in backward.gradients:
                grad = next(values) if g.form is None else build(g.form, values)
                known = found.get(g.name)
                found[g.name] = grad if known is None else known if grad is None else known + grad
        return found

    def _backward(
        self, k: int, leaving: list[Any], rest: list[Any], tangents: Sequence[Any] | None
    ) -> list[Any]:
        """The results of the k-th backward, from what the forward saved for it."""
        backwards = self.signature.backwards
        slots = self.programs[0].signature.outputs[-len(rest) :] if rest else ()
        saved = {s.name: v for s, v in zip(slots, rest, strict=True) if isinstance(s, Saved | SavedSize)}
        ports = self.programs[k + 1].signature.inputs
        given = [saved[s.name] for s in ports if isinstance(s, Saved | SavedSize)]
        before = sum(len(b.tangents) for b in backwards[:k])
        mine = None if tangents is None else list(tangents)[before : before + len(backwards[k].tangents)]
        given += self._tangents(backwards[k : k + 1], leaving, mine)
        return self.calls[k + 1](given + self._constants(k + 1))

    def _count(self, given: Sequence[Any] | None) -> None:
        """Are there as many tangents as it takes? That of a loss need not be given."""
        expected = [t for b in self.signature.backwards for t in b.tangents]
        if (given is None and self.signature.loss is not None) or len(given or ()) == len(expected):
            return
        names = ", ".join(self.signature.leaving[t.leaving].slot.describe() for t in expected)
        raise InvalidOption(
            f"This export takes {len(expected)} tangents ({names}) and got {len(given or ())}: "
            "use exported.call(args, kwargs, tangents=[...])."
        )

    def _tangents(
        self, backwards: Sequence[Backward], leaving: list[Any] | None, given: Sequence[Any] | None
    ) -> list[Any]:
        """Tangents in the layout that the program expects; that of a loss is one."""
        expected = [t for b in backwards for t in b.tangents]
        if given is None and leaving is not None and self.signature.loss is not None:
            given = [torch.ones_like(leaving[t.leaving]) for t in expected]
        found: list[Any] = []
        for t, tangent in zip(expected, given or (), strict=True):
            if t.type is not None and tangent.stride() != t.type.stride:
                tangent = laid_out(tangent, t.type.stride)
            found += parts_of(tangent)
        return found


def _check_transforms(leaves: list[Any]) -> None:
    """Derivatives that are taken around a run would all be zero."""
    around = {"grad", "jvp"}.intersection(kinds())
    if around and any(isinstance(t, Tensor) and any(True for _ in takes_part(t)) for t in leaves):
        raise InvalidOption(
            f"An export runs inside of torch.func.{around.pop()}, and its results have no history. Export "
            "with loss= or tangents=True, or let the function that you export take the derivative."
        )


class Reached(dict[Place, Tensor]):
    """The tensors of one call, by place."""

    def __init__(self, leaves: list[Any], state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.leaves, self.state = leaves, state

    def __missing__(self, place: Place) -> Tensor:
        if place.kind == "argument":
            found = self.leaves[place.of]
        elif place.kind == "held":
            found = self.state[place.of]
        else:
            found = whole_storage(self[place.of]) if place.kind == "memory" else base_of(self[place.of])
        self[place] = found
        return found

"""One recording of a function for export: what it was given and holds, and what it left behind.

What optimizers keep and what is in `.grad` may be there or not. What a call leaves there, the next one finds:
`stand_in` puts tensors like it in place, and the function can be recorded as it runs then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aheadgrad import pipeline
from aheadgrad.errors import CaptureError, FallbackError, UnsupportedInput
from aheadgrad.export.holding import HeldTensor, Holding, grad_of, leaves_tensor
from aheadgrad.export.matching import storage_of
from aheadgrad.export.signature import Place
from aheadgrad.export.trees import LEAF, Tree, paths, tree_of
from aheadgrad.facts.facts import SameAs
from aheadgrad.frontends.function import Flat, make_call
from aheadgrad.frontends.state import changed
from aheadgrad.frontends.trace import random_states
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.program.slots import UserOutput
from aheadgrad.program.values import Value
from aheadgrad.recording.compared_values import FIXED, SIMPLE, freeze
from aheadgrad.recording.recording import Recording
from aheadgrad.report.journal import Journal
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.exporting import optimizers_untold, told_of_export
from aheadgrad.torchlayer.hooks import has_hooks_after_grad, hooks_on
from aheadgrad.torchlayer.symbols import is_symbolic
from aheadgrad.torchlayer.unbacked import as_tensor, sizes_from_values


@dataclass(eq=False)
class Left:
    """What one run of the function left behind, as the trace sees it."""

    returns: Tree = LEAF
    outputs: int = 0
    numbers: tuple[int, ...] = ()  # those of them that are numbers which values decide, and leave as tensors
    found: frozenset[str] = frozenset()  # the names of what may be there, and was
    there: frozenset[str] = frozenset()  # ... and of what is there now
    gradients: frozenset[str] = frozenset()  # ... of which these are gradients
    tracked: frozenset[str] = frozenset()  # those of both that matter to later calls
    made: list[str] = field(default_factory=list)  # of that: new; results behind the function's own
    renewed: list[str] = field(default_factory=list)  # names of what has another tensor now; behind those
    replaced: dict[str, Tensor] = field(default_factory=dict)  # by path: held before, lost for good


@dataclass(eq=False)
class Recorded:
    """A recording with its joint program; `tensors` is what the function holds, `reals` are the tensors
    that the program's inputs (and members) were when it was recorded."""

    recording: Recording
    joint: Joint
    left: Left
    tensors: list[HeldTensor]
    reals: list[Tensor]
    places: list[Place]
    constants: dict[str, Tensor]  # what the function reached in ways that have no name
    flat: Flat

    def output(self, index: int) -> Any:
        """The value of a flat output that is a tensor in memory of its own."""
        fact = self.joint.facts.outputs[index]
        slot = UserOutput(fact.output if isinstance(fact, SameAs) else index)
        return next(e.value for e in self.joint.leaving if e.slot == slot)

    def like(self, name: str) -> Tensor:
        """A tensor as one that the call has made."""
        value = self.output(self.made_at(name))
        if type(value) is not Value:
            raise CaptureError("An optimizer keeps tensor subclasses in its state, which cannot be exported.")
        look = value.type
        if not all(isinstance(n, int) for n in (*look.size, *look.stride)):
            raise CaptureError(
                f"The size of {name} depends on that of an argument, which cannot be exported."
            )
        made = torch.empty_strided(look.size, look.stride, dtype=look.dtype, device=look.device)
        return made.zero_()

    def made_at(self, name: str) -> int:
        """The number of the flat output that a tensor leaves as."""
        names = [*self.left.made, *self.left.renewed]
        return len(self.joint.facts.outputs) - len(names) + names.index(name)


class Recorder:
    """Records one function for one kind of call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        flat: Flat,
        *,
        forward_only: bool,
        symbols: Symbols,
        decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if not isinstance(leaf, (Tensor, *FIXED)):
                raise UnsupportedInput(
                    f"{path} is a {type(leaf).__name__}, of which an export knows nothing. Give tensors, "
                    "numbers and texts, in containers that pytree knows; or let the function close over it."
                )
        self.fn, self.flat, self.symbols = fn, flat, symbols
        # Without cuts between outputs, where one backward would hand over to another.
        self.options = Options(partition="min_cut", pieces=0, dynamic=False, decompositions=decompositions)
        self.holding = Holding(fn)
        self.forward_only = forward_only
        self._check_hooks()
        self.copied: int | None = None  # the flat output that leaves once more as a copy
        self.kept: frozenset[str] = frozenset()  # gradients that matter to later calls, by name

    def _check_hooks(self) -> None:
        """Those of held tensors run in the recording, where there is a backward that would run them."""
        for h in self.holding.owners:
            if not self.forward_only and has_hooks_after_grad(h.tensor):
                raise CaptureError(
                    f"{h.name} has a hook for when its gradient was added to .grad, which an export of "
                    "gradients (loss=, tangents=, partition=) does not do. Export a function that calls "
                    "backward(), or remove the hook and register it on exported.parameters."
                )
        for leaf, path in zip(self.flat.leaves, self.flat.paths, strict=True):
            if isinstance(leaf, Tensor) and self.forward_only and leaf.requires_grad and hooks_on(leaf):
                raise UnsupportedInput(f"{path} has hooks, which an export leaves out. Remove them.")

    def record(self) -> Recorded:
        """A function may change an attribute at its first call, if that does nothing else than later ones."""
        try:
            return self._record()
        except FallbackError as error:
            if not error.once:
                raise
            why = error
        try:
            found = self._record()
            self._put_back()
            first = self._record(settled=False)
        finally:
            self._put_back()
        first.recording.release()
        one, other = ((str(r.joint.program), str(r.joint.facts.outputs)) for r in (first, found))
        if one != other:
            found.recording.release()
            raise why
        return found

    def _put_back(self) -> None:
        self.holding.state.put_back()
        self.holding.put_back()

    def _record(self, *, settled: bool = True) -> Recorded:
        """One run; if it is `settled`, what it changes besides tensors is refused."""
        holding, left = self.holding, Left()
        tensors = holding.tensors
        look = holding.state.look(in_words=True)
        sees: list[Callable[[Any], Any]] = []

        @contextmanager
        def around(see: Callable[[Any], Any]) -> Iterator[None]:
            sees[:] = [see]
            with holding.swapped(see):
                yield

        def run(*args: Any, **kwargs: Any) -> list[Any]:
            result, see = self._run(args, kwargs), sees[0]
            moved = holding.settle(see, strict=settled)
            originals = {id(see(h.tensor)): h.tensor for h in tensors}
            left.replaced = {path: originals[key] for key, path in holding.replaced.items()}
            now = holding.state.look({**originals, **holding.stand_ins})
            if now.found != look.found and settled:
                known = {id(h.tensor) for h in tensors}
                for t in now.tensors:
                    if id(t) not in known:
                        path = now.places[id(t)].path
                        holding.state.put_back()
                        raise leaves_tensor(path)
                raise changed(look.differences(now)[0][0])
            holding.state.put_back()  # lists of parameters that a module keeps beside them
            names = {id(h.tensor): h.name for h in tensors}
            renewed = {names[id(originals[id(t)])]: now for t, now in moved}
            return self._results(result, see, tensors, left, renewed)

        call = make_call(run, self.flat, [(h.slot, h.tensor) for h in tensors], around)
        call.whole = call.watched = True
        call.forward_only, call.symbols = self.forward_only, self.symbols
        with holding.watching_hooks():
            recording, joint = pipeline.record(call, self.options, Journal())
        session = recording.session
        reals = [e.real for e in session.entrances] + [m.real for m in session.members]
        found = _Places(tensors, self.flat, session)
        places = [found.of(real, slot) for real, slot in zip(reals, _slots(session), strict=True)]
        recorded = Recorded(recording, joint, left, tensors, reals, places, found.constants, self.flat)
        self._check_unnamed(found.constants, session)
        for path in _uses(recorded, left.replaced):
            raise CaptureError(
                f"The function uses {path} and then puts something else in its place than a tensor of the "
                "same shape without a history. Write to it under no_grad, or detach what you keep."
            )
        return recorded

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function returns; it may change no container among its arguments, and draws from torch."""
        given, drawn = pytree.tree_flatten((args, kwargs)), freeze(random_states())
        with told_of_export(), optimizers_untold():
            try:
                result = self.fn(*args, **kwargs)
            except AttributeError as error:
                self._explain(error)
                raise
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != given[1] or any(a is not b for a, b in zip(leaves, given[0], strict=True)):
            raise CaptureError(
                "The function changes a list or dictionary among its arguments, which an export cannot "
                "repeat. Return what it adds instead."
            )
        if freeze(random_states()) != drawn:
            raise CaptureError(
                "The function draws random numbers of Python or numpy, which an export cannot repeat. "
                "Draw from torch, or pass the number as an argument."
            )
        return result

    def _check_unnamed(self, constants: Mapping[str, Tensor], session: Any) -> None:
        """What the function reaches in ways that have no name has no gradients and hooks."""
        seen = {id(e.real): e.seen for e in session.entrances}
        for t in constants.values():
            if hooks_on(t) or (id(t) in seen and grad_of(seen[id(t)]) is not None):
                raise CaptureError(
                    f"The function leaves a gradient in a tensor of size {tuple(t.shape)}, or uses its "
                    "hooks, and reaches it in a way that an export does not follow. Let it name the module."
                )

    def _explain(self, error: AttributeError) -> None:
        """Attributes of arguments are no part of them."""
        for leaf, path in zip(self.flat.leaves, self.flat.paths, strict=True):
            if isinstance(error.obj, Tensor) and isinstance(leaf, Tensor) and error.name in vars(leaf):
                raise UnsupportedInput(
                    f"The function reads {path}.{error.name}, an attribute that calls of an export could not "
                    "know. Pass it as an argument of its own."
                ) from error

    def _results(
        self, result: Any, see: Any, tensors: list[HeldTensor], left: Left, renewed: dict[str, Tensor]
    ) -> list[Any]:
        leaves, left.returns = tree_of(result, "the result")
        for leaf, path in zip(leaves, paths(left.returns), strict=True):
            if not isinstance(leaf, (Tensor, *SIMPLE)) and not is_symbolic(leaf):
                raise CaptureError(
                    f"The result has a {type(leaf).__name__} at {path or 'its top'}, which an export cannot "
                    "hold. Return tensors, numbers and texts (Hugging Face: config.use_cache=False)."
                )
            if isinstance(leaf, torch.Size) and any(map(sizes_from_values, leaf)):
                raise CaptureError(
                    f"The size at {path or 'the top'} is one that values decide. Return tuple(size)."
                )
        left.outputs = len(leaves)
        left.numbers = tuple(k for k, v in enumerate(leaves) if is_symbolic(v) and sizes_from_values(v))
        leaves = [as_tensor(v) if k in left.numbers else v for k, v in enumerate(leaves)]
        held = {id(h.tensor) for h in tensors}
        for leaf, path in zip(self.flat.leaves, self.flat.paths, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in held and grad_of(see(leaf)) is not None:
                raise CaptureError(
                    f"The function leaves a gradient in {path}.grad, which is no part of its results. "
                    "Return torch.autograd.grad(...) instead, or export with loss=."
                )
        copied = [] if self.copied is None else [leaves[self.copied].clone()]
        return [*leaves, *copied, *self._kept(leaves, see, tensors, left, renewed)]

    def _kept(
        self, leaves: list[Any], see: Any, tensors: list[HeldTensor], left: Left, renewed: dict[str, Tensor]
    ) -> list[Tensor]:
        """What the next call finds: what was not there and is, and what is there in another's place."""
        change = self.holding.change(see, self.kept)
        renewed.update(change.renewed)
        left.found, left.there = change.found, change.there
        left.made, left.renewed = list(change.made), list(renewed)
        both = change.found | change.there
        left.gradients = both & {f"{h.name}.grad" for h in self.holding.owners}
        left.tracked = both - left.gradients | self.kept
        moved = {id(see(h.tensor)) for h in tensors if h.name in renewed}
        stays = [t for t in (see(h.tensor) for h in tensors) if id(t) not in moved]
        given = [storage_of(see(v)) for v in self.flat.leaves if isinstance(v, Tensor)]
        shown = {id(v): storage_of(v) for v in leaves if isinstance(v, Tensor)}
        found: dict[str, Tensor] = {}
        for name, t in (*change.made.items(), *renewed.items()):
            others = [*map(storage_of, (*stays, *found.values()))]
            others += [storage for i, storage in shown.items() if i != id(t)]
            if storage_of(t) in others:
                raise CaptureError(
                    f"The function leaves {name} in the memory of another tensor, which an export cannot "
                    "keep. Clone it."
                )
            is_given = id(t) in moved or storage_of(t) in given
            found[name] = t.clone() if is_given else t
        return list(found.values())

    def start(self, kept: frozenset[str]) -> None:
        """All over again: this is what is there."""
        self.kept = kept
        self.holding.start()

    def stand_in(self, found: Recorded) -> None:
        """From now on there is what the recorded call has left."""
        before = {name: h.tensor for h in found.tensors for name in h.names}
        owners = {f"{h.name}.grad": h.tensor for h in self.holding.owners}
        there: dict[str, Tensor] = {}
        for name in found.left.there:
            if name in before:
                there[name] = before[name]
            elif name in owners:
                there[name] = torch.zeros_like(owners[name], requires_grad=False)
            else:
                there[name] = found.like(name)
        self.holding.stand_in(there)


def _uses(found: Recorded, tensors: Mapping[Any, Tensor]) -> set[Any]:
    """Which of these tensors the program looks at, by their keys."""
    program = found.joint.program
    used = {v for op in program.ops for v in op.uses}
    by_real = {id(real): e.value for real, e in zip(found.reals, found.joint.entrances, strict=False)}
    return {key for key, t in tensors.items() if by_real.get(id(t)) in used}


def _slots(session: Any) -> list[Any]:
    return [e.slot for e in session.entrances] + [m.slot for m in session.members]


class _Places:
    """Tells where tensors of a call are to be found again."""

    def __init__(self, tensors: list[HeldTensor], flat: Flat, session: Any) -> None:
        self.known = {id(h.tensor): Place("held", h.name) for h in tensors}
        for k, leaf in enumerate(flat.leaves):
            if isinstance(leaf, Tensor):
                self.known.setdefault(id(leaf), Place("argument", k))
        self.session = session
        self.constants: dict[str, Tensor] = {}

    def of(self, real: Tensor, slot: Any) -> Place:
        if id(real) in self.known:
            return self.known[id(real)]
        session = self.session
        if id(real) in session.made_owners:
            return Place("memory", self.of(session.made_owners[id(real)], slot))
        member = next((m.real for m in session.members if base_of(m.real) is real), None)
        if member is not None:
            return Place("base", self.of(member, slot))
        name = f"closed_over_{len(self.constants)}"
        self.constants[name] = real
        self.known[id(real)] = Place("held", name)
        return self.known[id(real)]

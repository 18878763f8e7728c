"""One recording of a function for export: what it was given and holds, and what it left behind.

A whole step may call `backward()` and leave gradients in `.grad`. One that finds gradients there adds to
them, so they are part of what it holds; one that clears them first never looks. Which of the two it is shows
when it is recorded again with gradients in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad import pipeline
from aheadgrad.errors import CaptureError, FallbackError, InvalidOption, UnsupportedInput
from aheadgrad.export.holding import HeldTensor, Holding, leaves_tensor
from aheadgrad.export.optimizers import Key
from aheadgrad.export.signature import Place
from aheadgrad.export.trees import LEAF, Tree, paths, tree_of
from aheadgrad.frontends.function import Flat, make_call
from aheadgrad.frontends.state import changed
from aheadgrad.joint.level import Joint
from aheadgrad.joint.requests import Request
from aheadgrad.options import Options
from aheadgrad.program.slots import UserOutput
from aheadgrad.program.values import TensorType, Value
from aheadgrad.recording.door import LiveDoor
from aheadgrad.recording.plain import FIXED, SIMPLE
from aheadgrad.recording.recording import Recording
from aheadgrad.report.journal import Journal
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.exporting import told_of_export
from aheadgrad.torchlayer.symbols import is_symbolic


@dataclass(eq=False)
class Left:
    """What one run of the function left behind, as the trace sees it."""

    returns: Tree = LEAF
    outputs: int = 0
    states: list[tuple[int, Key, str]] = field(default_factory=list)
    graded: set[int] = field(default_factory=set)  # ids of held tensors with a `.grad`
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

    def output(self, index: int) -> TensorType:
        """What a flat output looks like."""
        exits = (e.value for e in self.joint.leaving if e.slot == UserOutput(index))
        value = next(exits)
        if type(value) is not Value:
            raise CaptureError("An optimizer keeps tensor subclasses in its state, which cannot be exported.")
        return value.type


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
        self.options = Options(partition="min_cut", dynamic=False, decompositions=dict(decompositions or {}))
        self.holding = Holding(fn)
        self.forward_only = forward_only
        self.copied: int | None = None  # the flat output that leaves once more as a copy
        self.knows_grads = False  # is it known which gradients the function adds to?

    def record(self) -> Recorded:
        """With gradients in place of those that the function leaves, if it may add to them."""
        found = self._first()
        if self.knows_grads or not found.left.graded:
            return found
        self.knows_grads = True
        held = {id(h.tensor): h.tensor for h in found.tensors}
        grads = self.holding.grads = {key: _zeros(held[key]) for key in found.left.graded}
        again = self._record()
        kept = again.left.graded & _uses(again, grads)
        self.holding.grads = {key: g for key, g in grads.items() if key in kept}
        if kept == set(grads):
            found, again = again, found
        again.recording.release()
        if not kept or kept == set(grads):
            return found
        found.recording.release()
        return self._record()

    def _first(self) -> Recorded:
        """A function that changes an attribute may do so at its first call only."""
        before = self.holding.state
        try:
            return self._record()
        except FallbackError as error:
            if not error.once:
                raise
        try:
            return self._record()
        except FallbackError:
            before.put_back()
            self.holding.put_back()
            raise

    def _record(self) -> Recorded:
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
            given = pytree.tree_flatten((args, kwargs))
            with told_of_export(told=True):
                result = self.fn(*args, **kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if spec != given[1] or any(a is not b for a, b in zip(leaves, given[0], strict=True)):
                raise CaptureError(
                    "The function changes a list or dictionary among its arguments, which an export cannot "
                    "repeat. Return what it adds instead."
                )
            see = sees[0]
            holding.settle()
            originals = {id(see(h.tensor)): h.tensor for h in tensors}
            left.replaced = {path: originals[key] for key, path in holding.replaced.items()}
            now = holding.state.look(originals)
            if now.found != look.found:
                known = {id(h.tensor) for h in tensors}
                for t in now.tensors:
                    if id(t) not in known:
                        path = now.places[id(t)].path
                        holding.state.put_back()
                        raise leaves_tensor(path)
                raise changed(look.differences(now)[0][0])
            holding.state.put_back()  # lists of parameters that a module keeps beside them
            return self._results(result, see, tensors, left)

        call = make_call(run, self.flat, [(h.slot, h.tensor) for h in tensors], around)
        call.whole = call.watched = True
        call.forward_only, call.symbols = self.forward_only, self.symbols
        recording, joint = pipeline.record(call, self.options, Journal())
        session = recording.session
        reals = [e.real for e in session.entrances] + [m.real for m in session.members]
        found = _Places(tensors, self.flat, session)
        places = [found.of(real, slot) for real, slot in zip(reals, _slots(session), strict=True)]
        recorded = Recorded(recording, joint, left, tensors, reals, places, found.constants, self.flat)
        for path in _uses(recorded, left.replaced):
            raise CaptureError(
                f"The function uses {path} and then puts something else in its place than a tensor of the "
                "same shape without a history. Write to it under no_grad, or detach what you keep."
            )
        return recorded

    def _results(self, result: Any, see: Any, tensors: list[HeldTensor], left: Left) -> list[Any]:
        leaves, left.returns = tree_of(result, "the result")
        for leaf, path in zip(leaves, paths(left.returns), strict=True):
            if not isinstance(leaf, (Tensor, *SIMPLE)) and not is_symbolic(leaf):
                raise CaptureError(
                    f"The result has a {type(leaf).__name__} at {path or 'its top'}, which an export cannot "
                    "hold. Return tensors, numbers and texts (Hugging Face: config.use_cache=False)."
                )
        left.outputs = len(leaves)
        left.graded = {id(h.tensor) for h in tensors if _has_grad(see(h.tensor))}
        held = {id(h.tensor) for h in tensors}
        for leaf, path in zip(self.flat.leaves, self.flat.paths, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in held and _has_grad(see(leaf)):
                raise CaptureError(
                    f"The function leaves a gradient in {path}.grad, which is no part of its results. "
                    "Return torch.autograd.grad(...) instead, or export with loss=."
                )
        names = {id(h.tensor): h.name for h in tensors}
        made = [(k, n) for k, one in enumerate(self.holding.optimizers) for n in one.new(see, names)]
        left.states = [(k, key, name) for k, (key, name, _) in made]
        copied = [] if self.copied is None else [leaves[self.copied].clone()]
        return [*leaves, *copied, *(t for _, (_, _, t) in made)]

    def stand_in(self, found: Recorded) -> None:
        """From now on, the state that optimizers have made is there."""
        for j, (k, key, _) in enumerate(found.left.states):
            t = found.output(found.left.outputs + (self.copied is not None) + j)
            like = torch.zeros((), dtype=t.dtype, device=t.device)
            made = torch.empty_strided(t.size, t.stride, dtype=t.dtype, device=t.device).copy_(like)
            self.holding.optimizers[k].made[key] = made


def _has_grad(t: Tensor) -> bool:
    try:
        return t.requires_grad and t.is_leaf and t.grad is not None
    except RuntimeError:  # a view with a history that autograd refuses to look at by now
        return False


def _zeros(t: Tensor) -> Tensor:
    given = t.grad
    return torch.zeros_like(t, requires_grad=False) if given is None else given


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


def loss_index(loss: int | str, returns: Tree) -> int:
    """The number of the flat output that `loss` names."""
    written = list(paths(returns))
    if isinstance(loss, int) and not isinstance(loss, bool):
        if 0 <= loss < len(written):
            return loss
    else:
        spellings = (loss, f".{loss}", f"[{loss!r}]")
        fitting = [k for k, path in enumerate(written) if path in spellings]
        if len(fitting) == 1:
            return fitting[0]
    known = ", ".join(f"{k}: {path or 'the result itself'}" for k, path in enumerate(written))
    raise InvalidOption(f"loss={loss!r} is no output; choose a number or path of these: {known}.")


def of_loss(found: Recorded, slot: UserOutput) -> tuple[Joint, Value] | None:
    """The joint narrowed to the gradients of one output, and the output's value; None if it has none."""
    joint = found.joint
    for component in joint.components:
        for k, i in enumerate(component.exits):
            if joint.exits[i].slot != slot:
                continue
            value = joint.exits[i].value
            if len(component.exits) == 1:
                return _only(joint, component.number, joint.gradients[component.number]), value
            pattern = tuple(True if j == k else None for j in range(len(component.exits)))
            request = Request(component.number, pattern, joint.backward_autocast)
            further = LiveDoor(found.recording).more(request)
            return _only(joint, component.number, further.gradients, further.tape), value
    return None


def _only(joint: Joint, number: int, gradients: Any, tape: Any = None) -> Joint:
    if gradients is None:
        raise joint.failures[number]
    one = (joint.components[number],)
    return replace(joint, tape=tape or joint.tape, components=one, gradients=(gradients,))

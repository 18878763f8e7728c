"""A capture session: the trace, the inputs as the trace sees them, and the way back in.

The session stays alive behind a compiled entry: when a backward is asked for with tangents of a
pattern not seen before, its gradients are recorded in the same session, without running the
user's function again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.program.slots import ClosedOver, Slot, UserInput
from aheadgrad.recording.entrances import Entrance, Member, make_entrance
from aheadgrad.recording.environment import Ambient, tracing
from aheadgrad.recording.known_values import Values
from aheadgrad.recording.leaks import Handed
from aheadgrad.recording.ledger import Ledger
from aheadgrad.recording.lift import Lift
from aheadgrad.recording.limits import Limits
from aheadgrad.recording.open_sizes import OpenSizes
from aheadgrad.recording.recorder import Recorder
from aheadgrad.recording.records import Trace
from aheadgrad.recording.subclass_borders import enter_subclass
from aheadgrad.recording.veils import NeedsVeils, VeiledRecorder
from aheadgrad.report.origins import is_users
from aheadgrad.torchlayer import functional, random
from aheadgrad.torchlayer.autograd import base_of, is_view
from aheadgrad.torchlayer.control_flow import bodies_not_compiled
from aheadgrad.torchlayer.dispatch import no_function_modes, python_dispatcher
from aheadgrad.torchlayer.fake import FakeTensor, FakeTensorMode, fake_like
from aheadgrad.torchlayer.memory import is_borrowed, is_nowhere
from aheadgrad.torchlayer.own_kernels import own_kernels
from aheadgrad.torchlayer.plain_numbers import shown_to
from aheadgrad.torchlayer.subclasses import Veil, is_foreign, is_plain, part_names, parts_of
from aheadgrad.torchlayer.unbacked import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    follow_numbers,
    follow_values,
    follows_values,
)

T = TypeVar("T")


class Session:
    def __init__(
        self,
        mode: FakeTensorMode,
        decompositions: Mapping[Any, Callable[..., Any]],
        *,
        veiled: bool = False,
    ) -> None:
        self.mode = mode
        self.veiled = veiled  # are there tensor subclasses?
        self.sized = False  # are there symbolic sizes?
        self.plain_numbers = False  # must symbolic sizes look like numbers to the user's code?
        self.followed = False  # did sizes become symbols because values decide on them?
        self.refused: Exception | None = None  # a value, or a size that values decide, was asked for
        self.whole = False  # is the function a whole step: with backward(), .grad and numbers that it reads?
        self.fakes: dict[int, FakeTensor] = {}  # by id, for tensors whose sizes others made symbols of
        self.items: dict[int, Any] = {}  # by id, the numbers that zero-dimensional tensors stand for
        self._around: ExitStack | None = None  # what is on while the user's code (or a backward) runs
        self.trace = Trace()
        self.trace.sized = follows_values(mode)
        self.ledger = Ledger()
        self.entrances: list[Entrance] = []
        self.members: list[Member] = []
        self.hidden: dict[Any, dict[Any, None]] = {}  # by autograd node: storages saved inside it
        self._by_real: dict[int, Entrance] = {}
        self._closed_over: list[tuple[weakref.ref[Tensor], Entrance]] = []  # once arguments are forgotten
        self.ambient = Ambient()
        recorder = VeiledRecorder if veiled else Recorder
        self.values = Values(self.trace, mode)
        self.recorder = recorder(
            self.trace,
            mode,
            decompositions,
            self._adopt,
            self.ambient,
            self.values,
            self.ledger,
            self._asserted,
        )
        self.open_sizes = OpenSizes(self)
        self.reads_offsets = False
        self.hooked = False  # did the function put hooks on tensors?
        self.asks_autograd = False  # did the function ask what requires grad, or is a leaf?
        self.attends = False  # did the function call attention, whose kernels can be switched off?
        self.made_owners: dict[int, Tensor] = {}  # by id of all memory of some inputs: one of them
        self.parts: dict[int, Any] = {}  # by id: parts of subclasses, with their veils and values
        self.shared_parts: dict[int, dict[int, Tensor]] = {}  # by id of an output: with its tangents
        self.generators: list[tuple[torch.Generator, Tensor, int]] | None = None  # states, seeds at first
        self.limits = Limits(self.ledger, self.recorder.borrowed)
        self.handed = Handed(self)
        self.lifting = Lift(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything on: the user's code (or a backward) may run and is recorded."""
        modes: list[Any] = [self.recorder, self.lifting, bodies_not_compiled()]
        with (
            tracing(*modes, veiled=self.veiled),
            torch.autograd.set_multithreading_enabled(False),
            ExitStack() as stack,
        ):
            before, self._around = self._around, stack
            try:
                self._enter_symbols()
                yield
            finally:
                self._around = before

    def _enter_symbols(self) -> None:
        """What torch and the user's code need around them where sizes are symbols."""
        if self._around is None:
            return
        around: list[Any] = [python_dispatcher(on=True), own_kernels()] if self.sized else []
        if self.plain_numbers:
            around.append(shown_to(is_users, computed=self.whole))
        for one in around:
            self._around.enter_context(one)

    def follow_values(self) -> bool:
        """An op has a result whose size values decide. Can it be recorded with a symbol, from now on?"""
        if follows_values(self.mode) or self.veiled:
            return False
        follow_values(self.mode)
        self.followed = True
        self.trace.sized = self.sized = True
        self.plain_numbers = self.recorder.ops.exact = True
        self._enter_symbols()
        return True

    def following(self, run: Callable[[], T]) -> T:
        """What `run` gives; once more with symbols, where values decide on sizes."""
        try:
            return run()
        except DynamicOutputShapeException:
            if not self.follow_values():
                raise
        return run()

    def follow(self, error: BaseException) -> bool:
        """After an error: can a size or number that values decide be recorded with a symbol, from now on?"""
        if isinstance(error, DynamicOutputShapeException):
            return self.follow_values()
        if not self.whole or not isinstance(error, DataDependentOutputException):
            return False
        self.follow_values()
        return follow_numbers(self.mode)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Only the recorder on: for our own questions to the trace."""
        with tracing(self.recorder, veiled=self.veiled), torch.no_grad():
            yield

    def wrap(self, value: Any) -> Tensor:
        """A traced tensor that holds a value."""
        wrapped = functional.wrap(value)
        return Veil(wrapped) if self.veiled else wrapped

    def settle(self, t: Tensor) -> None:
        """A traced tensor with the strides that it has in eager."""
        self.settle_gradient(t)
        self.ledger.settle(t)

    def given_parts(self) -> dict[int, str]:
        """By id of their traced tensor: what the parts of inputs are called in generated code."""
        found: dict[int, str] = {}
        for i, e in enumerate(self.entrances):
            names = part_names(e.value, f"p{i}")
            for veil, name in zip(e.parts or (e.seen,), names, strict=True):
                found.setdefault(id(veil), name)
        return found

    def settle_gradient(self, g: Tensor) -> None:
        """As `settle`, for what a backward gives."""
        if self.veiled:
            self.recorder.settle(g)  # type: ignore[attr-defined]

    def fake(self, t: Tensor) -> FakeTensor:
        """A placeholder value for a real (or already fake) tensor."""
        with functional.outside():
            return fake_like(self.mode, self.fakes.get(id(t), t))

    def enter(self, slot: Slot, real: Tensor) -> Entrance:
        """The entrance for an input; the same tensor enters once."""
        known = self._entered(real)
        if known is not None:
            return known
        if not is_plain(real):
            self._must_be_open_to(slot, real)
        if is_foreign(real):
            return self._known_as(real, enter_subclass(self, slot, real))
        check_dense(slot.describe(), real)
        with no_function_modes():
            value = self.fake(real)
            if id(real) in self.items:
                value.item_memo = self.items[id(real)]
            with_history = real.requires_grad and not real.is_leaf
            wrapped = self.wrap(value)
            leaf = self.wrap(self.fake(value)) if with_history else None
            entrance = make_entrance(slot, real, value, wrapped, leaf)
        return self._known_as(real, entrance)

    def _must_be_open_to(self, slot: Slot, real: Tensor) -> None:
        """Before a subclass enters: it needs a trace with veils, and parts that are all from outside."""
        if not is_foreign(real):
            raise FallbackError(f"{slot.describe()} is a {type(real).__name__}, a tensor subclass")
        if not self.veiled:
            raise NeedsVeils("a tensor subclass appears in a trace of plain tensors")
        if any(type(part) is Veil for part in parts_of(real)):
            raise FallbackError("a tensor subclass is made of tensors from inside and from outside")

    def _known_as(self, real: Tensor, entrance: Entrance) -> Entrance:
        self.entrances.append(entrance)
        self.ledger.know(entrance.seen)
        self.ledger.admit(entrance)
        self._by_real[id(real)] = entrance
        return entrance

    def enter_as_member(self, member: Member) -> None:
        self.members.append(member)
        self.ledger.admit(member)

    def input(self, index: int) -> Entrance | Member:
        """By its number in the facts: members count down from -1."""
        return self.entrances[index] if index >= 0 else self.members[-1 - index]

    def entrance_of(self, seen: Tensor) -> Entrance | None:
        given = self.ledger.given(seen)
        return given if isinstance(given, Entrance) else None

    def _entered(self, real: Tensor) -> Entrance | None:
        """The entrance of a real tensor, if it has entered."""
        later = (e for held, e in self._closed_over if held() is real)
        return self._by_real.get(id(real)) or next(later, None)

    def is_leaf_input(self, t: Tensor) -> bool:
        entrance = self.entrance_of(t) or self._entered(t)
        return entrance is not None and entrance.is_leaf

    def lift(self, real: Tensor) -> Tensor:
        """A real tensor met by the user's code: a hidden input from now on."""
        if isinstance(real, FakeTensor):
            return self.wrap(real)
        known = self._entered(real)
        if known is None:
            if is_nowhere(real):
                raise FallbackError("the memory of a tensor is handed to other code (DLPack, pointers)")
            number = sum(isinstance(e.slot, ClosedOver) for e in self.entrances)
            known = self.enter(ClosedOver(str(number)), real)
            if is_borrowed(real):
                self.recorder.borrowed.add(functional.storage_key(known.value))
        elif isinstance(known.slot, UserInput):
            raise FallbackError(f"{known.slot.describe()} is also reached from outside the arguments")
        return known.seen

    def _adopt(self, real: Tensor) -> Tensor:
        """A real tensor that reached the recorder directly, below autograd."""
        if real.requires_grad and is_plain(real):
            raise FallbackError(
                "an autograd.Function gets a tensor that requires grad from outside the arguments; "
                "pass it as an argument instead"
            )
        seen = self.lift(real)
        if self.veiled and not self.recorder.inside:  # type: ignore[attr-defined]
            return seen
        out: Tensor = functional.latest(seen)
        return out

    def _asserted(self) -> None:
        self.open_sizes.demands.accept()

    def is_new(self, t: Tensor) -> bool:
        """Is this surely a tensor in memory of its own, not an input or a view of one?"""
        if type(t) not in (Tensor, Veil) or t.layout is not torch.strided:
            return False
        if self.members or any(e.form is not None or e.old_memory is not None for e in self.entrances):
            return False
        key = functional.storage_key(t)
        return functional.is_wrapped(t) and all(e.storage != key for e in self.entrances)

    def must_be_no_view(self, seen: Tensor) -> None:
        """Before `x.detach_()`: an input that is a view enters without its base, but eager knows."""
        entrance = self.entrance_of(seen)
        if entrance is None:
            return
        if is_view(entrance.real):
            raise RuntimeError("Can't detach views in-place. Use detach() instead.")
        entrance.no_view = True

    def must_not_get_a_second_history(self, t: Tensor) -> None:
        """A view that came without grad and got a history through a part of it: eager takes it for
        a leaf, or not, depending on whether it was used in between."""
        entrance = self.entrance_of(t)
        if entrance is None or entrance.required_grad or not t.requires_grad:
            return
        if torch.is_grad_enabled() and is_view(entrance.real):
            raise FallbackError("an input that is a view without grad gets a history more than once")

    def forget_arguments(self) -> None:
        """Drops the caller's tensors; what the function closes over stays known as long as it lives."""
        nothing = torch.empty(0)
        closed_over = (e for e in self._by_real.values() if isinstance(e.slot, ClosedOver))
        self._closed_over += [(weakref.ref(e.real), e) for e in closed_over]
        for e in self.entrances:
            e.real = nothing
        for m in self.members:
            m.real = m.owner = nothing
        self.refused = None
        self._by_real.clear()
        self.parts.clear()
        self.made_owners.clear()

    def check_generator(self, generator: torch.Generator) -> None:
        """Random numbers are drawn from it at each call: it must be the caller's, and be left to advance."""
        if self.generators is None:
            return
        found = next((known for known in self.generators if known[0] is generator), None)
        if found is None:
            raise FallbackError("a random generator is used that the function makes itself")
        with functional.outside():
            if random.was_set(*found):
                raise FallbackError("the random state is set inside the function")

    def note_hidden(self, written: Tensor, others: list[Tensor]) -> None:
        """What an in-place op on a view saves for its sizes alone: its node sits inside another."""
        base = base_of(written) if written.requires_grad else None
        if base is not None and base.grad_fn is not None:
            self.hidden.setdefault(base.grad_fn, {}).update(
                dict.fromkeys(map(functional.storage_key, others))
            )

    def watch_storage(self, seen: Tensor) -> None:
        """Before `x.set_(y)`: keep an eye on the storage that x is about to leave."""
        entrance = self.entrance_of(seen)
        if entrance is not None and entrance.old_memory is None:
            entrance.old_memory = seen.detach()


def check_dense(what: str, t: Tensor) -> None:
    """Before a plain tensor enters: of others, fake tensors and functionalization know too little."""
    if t.layout is not torch.strided or t.is_quantized:
        kind = "quantized" if t.is_quantized else str(t.layout).removeprefix("torch.")
        raise FallbackError(f"{what} is {kind}, not a dense tensor")

"""What a backend is asked for, and what it gives.

    def mine(request: Request) -> Executable: ...

A request has the program, as an FX module of the backend's own (`request.module`: nobody else holds it, and
its fake tensors are new) and as the ops themselves (`request.program`). An executable takes its arguments in
a list, which it may empty, so that they are freed as soon as they have been used.
Nothing is passed through globals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from aheadgrad.program.doors import example_inputs, module_of
from aheadgrad.program.program import Program
from aheadgrad.program.slots import NoGradient, Signature, Tangent
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.fake import FakeTensorMode, with_strides

Boxed = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Wants:
    """What a backend wishes for, as its attribute `wants`.

    `decompositions` are made while the function is recorded (a caller's own come before them). `layouts`: for
    how many layouts of tangents a backward is compiled before others are copied into the one that is
    expected. `partition`: what `partition="default"` means with this backend. `replays`: can random ops run
    again with the numbers that they drew before? `updates`: programs change their inputs themselves, where
    autograd need not see it (the statistics of a BatchNorm). `fuses`: ops that take each element by itself
    become one kernel with their neighbours, so that what only these read is not written to memory. `begin` is
    called with the kind of device when a function is about to be recorded: what takes long starts beside it.
    """

    decompositions: Callable[[], Mapping[Any, Callable[..., Any]]] = dict
    layouts: int = 8
    partition: str = "default"
    replays: bool = True
    updates: bool = False
    fuses: bool = False
    begin: Callable[[str], None] = lambda device: None


@dataclass(frozen=True, eq=False)
class Request:
    """One program to compile; `mode` is the fake mode that its graph's tensors are to live in.

    `layouts` has the strides of values that an earlier program of the same call makes in another layout than
    recorded. `given_away` are values whose memory a backward may use, unless the graph is kept. `shared` is
    for the backend: the same for all programs of a call. `watch` notes the time of a compile that comes
    later than the backend's call; `note` is for what a reader of the report should know.
    """

    program: Program
    mode: FakeTensorMode | None = None
    layouts: Mapping[Value, tuple[Any, ...]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    given_away: frozenset[Value] = frozenset()

    @contextmanager
    def watch(self) -> Iterator[None]:
        with self.shared["watch"](self.role) if "watch" in self.shared else nullcontext():
            yield

    def note(self, text: str) -> None:
        if "note" in self.shared:
            self.shared["note"](text)

    @property
    def ahead(self) -> bool:
        """Is an earlier program of this call still being built (a backend keeps it as "building")? Then the
        backward is compiled meanwhile, not when it is first called."""
        return bool(self.shared.get("building"))

    @property
    def role(self) -> str:
        """ "forward", "backward" or "inference"."""
        return self.program.role

    @property
    def signature(self) -> Signature:
        return self.program.signature

    @cached_property
    def module(self) -> fx.GraphModule:
        return module_of(self.program, self.mode)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def example_inputs(self) -> list[Any]:
        """What the program will be given: fake tensors, in the layout that they will have."""
        found = example_inputs(self.module)
        for i, port in enumerate(self.program.inputs):
            strides = self.layouts.get(port.value) if type(port.value) is Value else None
            if strides is not None:
                found[i] = with_strides(found[i], strides)
        return found

    @property
    def static(self) -> tuple[int, ...]:
        """Inputs that stay where they are from call to call: parameters and buffers."""
        return tuple(i for i, p in enumerate(self.program.inputs) if p.static)

    @property
    def donated(self) -> tuple[int, ...]:
        """Inputs of a backward that nobody else needs, if the graph is not kept."""
        return tuple(i for i, p in enumerate(self.program.inputs) if p.value in self.given_away)

    @property
    def tangent_strides(self) -> tuple[tuple[Any, ...], ...]:
        """How the tangents of a backward are laid out."""
        inputs = self.program.inputs
        return tuple(p.value.type.stride for p in inputs if isinstance(p.slot, Tangent))


@dataclass(frozen=True, eq=False)
class Executable:
    """`call` takes a list and returns one. `strides` are those of its results, where they are known to be
    others than the program says. `inline(script, places, keep_places=...)` writes its lines into a script,
    for callers that generate code; they say whether they go on with what is in these places."""

    call: Boxed
    strides: tuple[Any, ...] | None = None
    inline: Callable[..., list[str]] | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        return self.call(args)


class Later:
    """Something callable that is made when it is first called: many forwards never see a backward."""

    def __init__(self, make: Callable[[], Boxed], lock: AbstractContextManager[Any] | None = None) -> None:
        self._make: Callable[[], Boxed] | None = make
        self._made: Boxed | None = None
        self._lock = threading.Lock() if lock is None else lock

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    assert self._make is not None
                    self._made, self._make = self._make(), None
        return self._made(args)


Backend = Callable[[Request], Any]


def as_executable(made: Any) -> Executable:
    """What a backend returned: it may also be a function alone."""
    return made if isinstance(made, Executable) else Executable(made)


def wants_of(backend: Backend) -> Wants:
    found: Wants = getattr(backend, "wants", _NOTHING)
    return found


_NOTHING = Wants()


def only_gradients(program: Program, run: Executable) -> Executable:
    """Without the results that are no gradients: `NoGradient` slots, which are None."""
    kinds = program.signature.outputs
    kept = [i for i, slot in enumerate(kinds) if not isinstance(slot, NoGradient)]
    if len(kept) == len(kinds):
        return run

    def gradients_only(args: list[Any]) -> list[Any]:
        results = run.call(args)
        return [results[i] for i in kept]

    return Executable(gradients_only)

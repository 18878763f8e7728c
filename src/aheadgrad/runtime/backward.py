"""The backward of one component: a program per pattern of tangents, compiled when first seen.

A pattern says which tangents exist and how they are laid out. Missing tangents stay missing:
their branch is not computed, and inputs that only they lead to get `None`. The same holds for gradients
that this backward does not want.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.contract import Executable
from aheadgrad.conventions.whole_subclasses import tangent_pattern
from aheadgrad.torchlayer.autocast import AutocastState, autocast_state
from aheadgrad.torchlayer.autograd import unpacked, version
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.subclasses import Form
from aheadgrad.torchlayer.wanted import Wanted

Run = Callable[[list[Any]], list[Any]]
Tangents = Sequence[Tensor | None]
Make = Callable[[tuple[Any, ...], AutocastState | None, Wanted], tuple[Run, frozenset[int] | None]]
"""Makes a program from tangents like these to the wanted gradients; with the positions of the saved tensors
that it uses, if known."""

MAX_WANTED = 16  # sets of wanted gradients; then all are computed


class Failure:
    """A backward that cannot be: it raises what eager raises."""

    def __init__(self, error: Exception) -> None:
        self.kind, self.args = type(error), error.args

    def __call__(self, args: list[Any]) -> list[Any]:
        raise self.kind(*self.args)


class Backward:
    """Finds (or makes) the program for the tangents at hand. `usual` is that for the expected ones."""

    def __init__(
        self,
        expected: tuple[Any, ...],
        usual: Executable | None,
        make: Make,
        *,
        fixed_autocast: bool,
        layouts: int = 8,
    ) -> None:
        self.expected = expected
        self.conjugable: tuple[int, ...] = ()  # tangents that are complex
        self.layouts = layouts  # of tangents; then others are copied into the expected one
        self.usual = usual
        self.make = make
        self.fixed_autocast = fixed_autocast
        self.programs: dict[Any, Run] = {}
        self.sets: set[Wanted] = set()
        self.used: dict[Any, frozenset[int] | None] = {}
        self.checking: Backward | None = None  # the same for anomaly mode
        if usual is not None:
            self.programs[(self.usual_pattern, None, None)] = usual.call

    @property
    def usual_pattern(self) -> tuple[Any, ...]:
        return self.expected

    def find(self, pattern: tuple[Any, ...], state: AutocastState | None, wanted: Wanted) -> Run:
        program = self.programs.get((pattern, state, wanted))
        if program is None:
            with RECORDING:
                if wanted is not None:
                    wanted = few(self.sets, wanted)
                program = self.programs.get((pattern, state, wanted))
                if program is None:
                    program, used = self.make(pattern, state, wanted)
                    self.programs[(pattern, state, wanted)] = program
                    self.used[pattern, wanted] = used
        return program

    def arranged(
        self, tangents: Tangents, known: Collection[Any] | None = None
    ) -> tuple[tuple[Any, ...], Tangents]:
        """The pattern of these tangents, and the tangents: as they are, or, where too many patterns are known
        already, laid out as expected."""
        pattern = tuple(None if t is None else _layout(t) for t in tangents)
        if known is not None and pattern not in known and (self.layouts == 1 or len(known) >= self.layouts):
            tangents = tuple(map(laid_out, tangents, self.expected))
            pattern = tuple(None if t is None else _layout(t) for t in tangents)
        return pattern, tangents

    def needs(self, tangents: Tangents, wanted: Wanted) -> frozenset[int] | None:
        """Which saved tensors the program for these tangents uses, if that is known."""
        pattern, _ = self.arranged(tangents)
        self.find(pattern, None if self.fixed_autocast else autocast_state(), wanted)
        return self.used.get((pattern, wanted))

    def run(self, node: Any, saved: list[Any], given: list[Tensor | None], wanted: Wanted) -> list[Any]:
        """The gradients. Saved tensors and tangents are used up, and the node lets go of what it saved unless
        the graph is kept."""
        pattern, _ = self.arranged(given)
        state = None if self.fixed_autocast else autocast_state()
        program = self.programs.get((pattern, state, wanted))
        tangents: Tangents = given
        if program is None:
            pattern, tangents = self.arranged(given, {p for p, _, _ in self.programs})
            program = self.find(pattern, state, wanted)
        saved += [t for t in tangents if t is not None]
        del tangents
        given.clear()
        return self.use(node, program, saved, state)

    def use(self, node: Any, program: Run, args: list[Any], state: AutocastState | None) -> list[Any]:
        if node is not None and not isinstance(program, Failure):
            node.maybe_clear_saved_tensors()
        if state is None:
            return program(args)
        with state.suspended():
            return program(args)


def few(known: set[Wanted], wanted: Wanted) -> Wanted:
    """A set of wanted gradients; all of them when too many sets have been seen."""
    if len(known) < MAX_WANTED:
        known.add(wanted)
    return wanted if wanted in known else None


def _layout(t: Tensor) -> Any:
    return t.stride() if type(t) is Tensor else tangent_pattern(t)


def laid_out(t: Tensor | None, strides: Any) -> Tensor | None:
    """The same tangent with the strides that a program was compiled for."""
    if t is None or type(t) is not Tensor or isinstance(strides, Form) or t.stride() == strides:
        return t
    return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)


def unchanged(
    ctx: Any, backward: Backward, tangents: tuple[Any, ...], wanted: Wanted, fresh: tuple[bool, ...]
) -> list[Any]:
    """Something saved was changed since: that matters only to the tangents whose gradients need it.

    `fresh` are those of the saved tensors that the call made: their version was 0 when they were saved.
    """
    some = any(t is None for t in tangents) and any(t is not None for t in tangents)
    needed = backward.needs(tangents, wanted) if some else None
    if needed is None or not all(fresh[k] for k in needed):
        return list(ctx.saved_tensors)  # raises
    saved = [unpacked(ctx, k) if k in needed else None for k in range(len(fresh))]
    if any(t is not None and version(t) != 0 for t in saved):
        return list(ctx.saved_tensors)
    return saved


def found(
    backward: Backward,
    ctx: Any,
    saved: list[Any],
    tangents: tuple[Any, ...],
    inputs: int,
    wanted: Wanted,
) -> list[Any]:
    """Gradients for these tangents, of which there may be none: all that came, came through links."""
    if all(t is None for t in tangents):
        return [None] * inputs
    return list(backward.run(ctx, saved, list(tangents), wanted))

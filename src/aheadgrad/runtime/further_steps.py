"""What the run time asks for when a backward comes along that was not compiled: the walk again."""

from __future__ import annotations

from typing import Any, Protocol

from aheadgrad.backends.contract import Executable
from aheadgrad.joint.level import Component, Level
from aheadgrad.partition.saved import SavedSet
from aheadgrad.program.program import Program
from aheadgrad.runtime.backward import Backward, Run
from aheadgrad.runtime.laid_out import LaidOutBackward
from aheadgrad.runtime.links import Ways
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.subclasses import Form
from aheadgrad.torchlayer.wanted import Wanted


class Steps(Protocol):
    """The walk from a live recording on."""

    def backward(
        self,
        component: Component,
        saved: SavedSet,
        usual: Executable | None,
        pattern: tuple[Any, ...],
        state: AutocastState | None,
        wanted: Wanted,
        *,
        checking: bool,
    ) -> tuple[Run, frozenset[int] | None]:
        """A backward for tangents of this pattern to the wanted gradients; with the positions of the saved
        tensors that it uses."""

    def differentiable(
        self,
        component: Component,
        saved: SavedSet,
        ways: Ways,
        pattern: tuple[Any, ...],
        requiring: tuple[bool, ...],
        state: AutocastState | None,
        wanted: Wanted,
    ) -> Any:
        """A backward that can be differentiated: a `Step`, or what finds one."""

    def handing(
        self,
        component: Component,
        saved: SavedSet,
        pattern: tuple[Any, ...],
        wanted: Wanted,
        handed: tuple[int, ...],
        *,
        hands: int,
    ) -> tuple[Program, tuple[tuple[int, int], ...]] | None:
        """A backward that takes what is handed to it and hands on as in `Request`; with its ends."""

    def executable(self, program: Program) -> Executable:
        """Compiles a program that is there already."""

    def close(self) -> None:
        """Lets go of the recording."""


def backward_of(
    level: Level, component: Component, saved: SavedSet, usual: Executable | None, steps: Steps
) -> Backward:
    """The backward of a node, at any order; `usual` is the executable for the expected tangents."""
    backward = _backward(level, component, saved, usual, steps, checking=False)
    backward.checking = _backward(level, component, saved, None, steps, checking=True)
    dtypes = [level.exits[i].dtype for i in component.exits]
    backward.conjugable = tuple(k for k, dtype in enumerate(dtypes) if dtype is not None and dtype.is_complex)
    return backward


def _backward(
    level: Level,
    component: Component,
    saved: SavedSet,
    usual: Executable | None,
    steps: Steps,
    *,
    checking: bool,
) -> Backward:
    def make(pattern: Any, state: AutocastState | None, wanted: Wanted) -> tuple[Run, frozenset[int] | None]:
        return steps.backward(component, saved, usual, pattern, state, wanted, checking=checking)

    fixed = level.fixed_autocast
    if not level.lays_out:
        layouts = level.options.layouts
        return Backward(component.expected, usual, make, fixed_autocast=fixed, layouts=layouts)
    orders = tuple(
        e if isinstance(e, Form) else level.exits[i].order
        for i, e in zip(component.exits, component.expected, strict=True)
    )
    return LaidOutBackward(orders, usual, make, fixed_autocast=fixed, plainly=not level.veiled)

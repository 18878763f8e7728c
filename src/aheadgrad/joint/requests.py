"""The door to what is live: an entry asks there for what it was not compiled for.

    door.more(Request(0, (None, True), state))      ->  Further: another pattern of tangents
    door.more(Request(..., requiring=(True,)))      ->  Further with a level of its own: the next order
    door.more(Request(..., wanted=(True, False)))   ->  Further: gradients of the first target only

An entry whose door is closed still runs everything that it was compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from aheadgrad.errors import AheadgradError
from aheadgrad.joint.level import Gradients, NextOrder
from aheadgrad.program.cut import Sizes
from aheadgrad.program.tape import Tape
from aheadgrad.torchlayer.autocast import AutocastState
from aheadgrad.torchlayer.subclasses import Form
from aheadgrad.torchlayer.wanted import Wanted


class Unusual(NamedTuple):
    """A tangent of another kind than expected: what a backward for such tangents is recorded with.

    `form` is None for a plain tensor; `order` is that of its dimensions in memory.
    """

    form: Form | None
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """A backward of one component, to be recorded.

    `tangents` tells for each exit: None (missing), True (as expected), strides, a form, or `Unusual`.
    `requiring`: which of them require grad, for a backward that is to be differentiated. `wanted`: which of
    the component's targets gradients are asked for, None for all. `sizes`: for these
    only. `values` are real tensors and numbers that stand for saved values and tangents, where the backward
    looks at values; what is recorded with them is forgotten at once, unless it has a next order. `edges`:
    anomaly mode wants to know where gradients go. `handed` are places (by number) where backwards of higher
    order hand over to this one. It hands over in turn if `hands` is not 0: to the order so many below it, and
    to those below that.
    """

    component: int
    tangents: tuple[Any, ...]
    autocast: AutocastState | None
    requiring: tuple[bool, ...] | None = None
    sizes: Sizes | None = None
    values: tuple[list[tuple[Any, Any]], list[Any]] | None = None
    edges: bool = False
    wanted: Wanted = None
    handed: tuple[int, ...] = ()
    hands: int = 0


@dataclass(frozen=True, eq=False)
class Further:
    """What was recorded. `edges` has, by the number of an autograd node, where its gradients go.

    `handed` are the tangents that come in on the way, and `ends` tells for each gradient behind those of the
    targets how many orders below it is to be handed over, and at which place there.
    """

    gradients: Gradients
    tape: Tape
    sizes: Sizes | None
    edges: dict[int, tuple[tuple[int, int], ...]]
    level: NextOrder | None = None
    door: Door | None = None
    handed: tuple[Any, ...] = ()
    ends: tuple[tuple[int, int], ...] = ()


class Door(Protocol):
    def more(self, request: Request) -> Further:
        """Records more; raises what eager would raise in that backward, or one of the two below."""


class NeedsSizes(AheadgradError):
    """Such a backward assumes more of symbolic sizes than its entry: it is recorded for certain sizes."""


class LooksAtValues(AheadgradError):
    """Such a backward looks at values: it is recorded each time, with the values at hand."""


class NoDoor:
    """The door of an entry that was closed."""

    def more(self, request: Request) -> Further:
        raise AheadgradError(
            "This entry was closed: it runs what it was compiled for, and this backward (another pattern of "
            "tangents, or a derivative of another order) is not part of that."
        )

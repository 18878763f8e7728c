"""What stands for the recording of an entry that was loaded: enough for its check, and a way to record again.

The check of an entry asks its recording what was assumed. Most of that is in the facts; the rest is kept with
the entry (`Memo`). Whoever asks for more than was compiled (another pattern of tangents, the next order)
comes to a door that opens then: the function is recorded again, from tensors without memory; what is recorded
has to be the very program that was loaded, whose values it goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from aheadgrad.errors import AheadgradError
from aheadgrad.joint.level import Joint
from aheadgrad.joint.requests import Further, Request
from aheadgrad.program.values import Value
from aheadgrad.recording.door import LiveDoor
from aheadgrad.recording.recording import Recording
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.subclasses import values_of

_NOTHING = SimpleNamespace(borrowed=())


@dataclass(frozen=True)
class Memo:
    """What a recording knows besides its joint program.

    `inputs` tells for each entrance which of the tensors of a call it is; `spec` is the structure of results.
    """

    inputs: tuple[int, ...]
    no_views: tuple[bool, ...]
    attends: bool
    asks_autograd: bool
    grad_was_on: bool
    offsets: bool
    spec: str

    @classmethod
    def of(cls, recording: Recording, tensors: Sequence[Tensor], spec: str) -> Memo | None:
        """None if there is more to know."""
        session = recording.session
        special = session.members or session.made_owners or session.veiled or session.recorder.borrowed
        if special or recording.has_symbols or recording.failures:
            return None
        places = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
        if any(id(e.real) not in places for e in session.entrances):
            return None
        return cls(
            tuple(places[id(e.real)] for e in session.entrances),
            tuple(e.no_view for e in session.entrances),
            session.attends,
            session.asks_autograd,
            session.ambient.grad_was_on,
            recording.depends_on_offsets,
            spec,
        )

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Memo:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
        return cls(**values)


class Remembered:
    """A recording, as far as the check of a loaded entry asks for it."""

    numbers: tuple[Any, ...] = ()

    def __init__(self, memo: Memo, joint: Joint, tensors: Sequence[Tensor], spec: Any, returns: Any) -> None:
        self.facts, self.autocast = joint.facts, joint.autocast
        self.depends_on_offsets = memo.offsets
        self.forward = SimpleNamespace(grad_mode_before=joint.grad_before, out_spec=spec, outputs=())
        self.call = SimpleNamespace(returns=returns)
        entrances = [
            SimpleNamespace(real=tensors[i], slot=e.slot, form=None, no_view=no_view)
            for i, e, no_view in zip(memo.inputs, joint.entrances, memo.no_views, strict=True)
        ]
        self.session = SimpleNamespace(
            mode=None,
            entrances=entrances,
            members=(),
            made_owners={},
            veiled=False,
            recorder=_NOTHING,
            attends=memo.attends,
            asks_autograd=memo.asks_autograd,
            ambient=SimpleNamespace(grad_was_on=memo.grad_was_on),
        )

    def symbolic_inputs(self) -> dict[int, Any]:
        return {}

    def release(self) -> None:
        """Lets go of the arguments of the call."""
        for entrance in self.session.entrances:
            entrance.real = None


class LaterDoor:
    """The door of a loaded entry. `again` records once more, `is_same` tells whether that is the program."""

    def __init__(
        self, joint: Joint, again: Callable[[], tuple[Recording, Joint]], is_same: Callable[[Joint], bool]
    ) -> None:
        self._joint, self._again, self._is_same = joint, again, is_same
        self._live: LiveDoor | None = None

    def more(self, request: Request) -> Further:
        with RECORDING:
            if self._live is None:
                recording, joint = self._again()
                recording.release()
                if not self._is_same(joint):
                    raise AheadgradError(
                        "This backward needs more than what was compiled, and the entry came from the cache: "
                        "the function was recorded again and does something else now. Use cache=False, or "
                        "leave what it uses (its module, globals, files) as it was at the call."
                    )
                adopt(recording, self._joint)
                self._live = LiveDoor(recording)
                del self._again
            return self._live.more(request)


def adopt(recording: Recording, joint: Joint) -> None:
    """The recording goes on with the values of an equal joint program, which was loaded."""
    recording.lowering.take_over({v.number: v for v in _values(joint)}, joint.tape)
    recording.components = joint.components


def _values(joint: Joint) -> Iterator[Value]:
    for op in joint.tape.ops:
        yield from op.uses
        yield from op.values
    wholes = [e.value for e in joint.entrances] + [e.value for e in joint.exits]
    wholes += [v for g in joint.gradients if g is not None for v in (*g.tangents, *g.grads)]
    yield from (v for whole in wholes for v in values_of(whole) if type(v) is Value)

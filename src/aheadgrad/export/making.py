"""From a function and one call of it to an export: record, narrow to the loss, split, describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.errors import CaptureError, DataDependentError, FallbackError, InvalidOption
from aheadgrad.export.describing import Describing
from aheadgrad.export.dynamic_shapes import symbols_for
from aheadgrad.export.dynamic_shapes import with_names as sizes_with_names
from aheadgrad.export.exported import Exported
from aheadgrad.export.in_words import text
from aheadgrad.export.losses import loss_index, of_loss
from aheadgrad.export.matching import storage_of
from aheadgrad.export.programs import Constants, with_names, with_one
from aheadgrad.export.recorded import Recorder
from aheadgrad.export.signature import Stage
from aheadgrad.export.trees import paths, tree_of
from aheadgrad.frontends.function import Flat, flatten, parameter_names
from aheadgrad.joint.level import Joint
from aheadgrad.partition.saved import SavedSet
from aheadgrad.partition.split import forward_program, split
from aheadgrad.program.program import Program
from aheadgrad.program.slots import UserOutput
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.symbols import UnknownSize

_MOST = 4  # kinds of calls that lead to each other


def export(
    fn: Callable[..., Any] | nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: int | str | None = None,
    partition: str | None = None,
    tangents: bool = False,
    dynamic_shapes: Any = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Exported:
    """The program of one call as a value: with names for all that it takes and gives, to be run elsewhere.

        exported = aheadgrad.export(model, (x, y), loss="loss")
        print(exported)                                       # or exported.graph_module, exported.signature
        optimizer = torch.optim.SGD(exported.parameters.values(), lr=0.1)
        exported.backward(x, y)
        optimizer.step()

    Without `loss` it is the forward alone, or whatever the function does: a whole training step that calls
    `backward()` and an optimizer is one program. `loss` (the number or path of an output) adds the gradients
    of that output; `tangents=True` gradients for tangents that are given, of all outputs. `partition`
    ("default" or "min_cut") gives two programs, a forward and a backward.

    `dynamic_shapes={"x": {0: "batch"}}` are sizes that may be any; `decompositions` as in `compile`.
    docs/export.md says more.
    """
    if partition not in (None, "default", "min_cut"):
        raise InvalidOption(f'partition={partition!r}: choose "default", "min_cut" or None.')
    if isinstance(fn, Exported):
        raise InvalidOption("This is an export already; export the function or module that it was made from.")
    if not callable(fn):
        raise InvalidOption(f"aheadgrad.export needs a function or a module, not {type(fn).__name__}.")
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        raise InvalidOption("args: give the positional arguments in a tuple, as in export(model, (x,)).")
    given = tuple(args), dict(kwargs or {})
    flat = flatten(*given, parameter_names(fn))
    wants = loss is not None or partition is not None or tangents
    symbols = symbols_for(flat, dynamic_shapes)
    try:
        with RECORDING:
            recorder = Recorder(
                fn, flat, forward_only=not wants, symbols=symbols, decompositions=decompositions
            )
            making = _Making(recorder, given, loss, partition, wants)
            stages = making.stages()
            return Exported(tuple(_with_sizes(s, flat, dynamic_shapes) for s in stages), making.state())
    except FallbackError as error:
        raise CaptureError(f"This call cannot be exported: {_said(error.reason)}.") from error
    except DataDependentError as error:
        raise DataDependentError(_said(str(error))) from error
    except AssertionError as error:
        if not isinstance(error, UnknownSize) and not isinstance(error.__cause__, UnknownSize):
            raise
        raise CaptureError(
            "The function computes with a truth value that it reads from a tensor (.item() of a bool). Read "
            "a number: t.int().item(), or choose with torch.where."
        ) from error


def _said(text: str) -> str:
    """A reason, without the advice that is for `compile`."""
    text = text.replace('; frontend="dynamo" can', "").partition('\n  3. use frontend="dynamo"')[0]
    return text.replace("(a new value compiles a new entry)", "(an export is for one value)")


def _with_sizes(stage: Stage, flat: Flat, asked: Any) -> Stage:
    sizes = sizes_with_names(flat, asked, stage.signature.sizes)
    return replace(stage, signature=replace(stage.signature, sizes=sizes))


class _Making:
    """Makes the stages of one export, and keeps the tensors that they hold."""

    def __init__(
        self, recorder: Recorder, given: Any, loss: int | str | None, partition: str | None, wants: bool
    ) -> None:
        self.recorder = recorder
        _, self.takes = tree_of(given, "the arguments")
        self.asked, self.partition, self.wants = loss, partition, wants
        self.asks = "forward" if not wants else "joint" if partition is None else "split"
        self.constants = Constants()
        self.tensors: dict[str, Tensor] = {}
        self.gradients: set[str] = set()  # the names of all that were there at some time
        self.later: set[str] = set()  # the names of what is there in later calls only

    def stages(self) -> list[Stage]:
        """One; or several, where a call finds other state or gradients than the one before it.

        Gradients that no call looks at, nor writes to, are nobody's business: whether they are there or not,
        a call is the same. Otherwise they are kept, as state is, and all is recorded again.
        """
        stages = self._merged(self._chain())
        for everything in (False, True):
            looked_at = {h.name for s in stages or () for h in s.signature.held if h.kind == "gradient"}
            if stages is not None and looked_at <= self.recorder.kept:
                break
            if self.wants:
                raise CaptureError(
                    f"The function asks for {', '.join(sorted(looked_at or self.gradients))}, which is no "
                    "part of an export of gradients (loss=, tangents=, partition=). Export a function that "
                    "calls backward()."
                )
            kept = self.gradients if everything or stages is None else looked_at
            self.recorder.start(frozenset(kept))
            self.constants, self.tensors = Constants(), {}
            stages = self._merged(self._chain())
        assert stages is not None
        return stages

    def _chain(self) -> list[Stage]:
        """A stage for each set of what there is, up to one that was there before."""
        found: dict[frozenset[str], Stage] = {}
        while True:
            stage, left = self.stage(), self.found.left
            self.gradients |= left.gradients
            found[left.found] = stage
            if left.there in found:
                return list(found.values())
            if len(found) == _MOST:
                names = ", ".join(sorted(left.there ^ left.found))
                raise CaptureError(
                    f"Each call makes or drops something else than the one before it: {names}."
                )
            self.recorder.stand_in(self.found)

    def _merged(self, stages: list[Stage]) -> list[Stage] | None:
        """Stages for calls that find the same; None if two of those are different."""
        finds = [s.signature.finds for s in stages]
        always = {name for name in finds[0] if all(name in names for names in finds)}
        merged: dict[tuple[str, ...], Stage] = {}
        for stage in stages:
            names = tuple(n for n in stage.signature.finds if n not in always)
            stage = replace(stage, signature=replace(stage.signature, finds=names))
            if text((merged.setdefault(names, stage),)) != text((stage,)):
                return None
        self.later = {name for s in stages for name, _ in s.signature.made} - {*finds[0]}
        return list(merged.values())

    def stage(self) -> Stage:
        self.found = self.recorder.record()
        loss = None if self.asked is None else loss_index(self.asked, self.found.left.returns)
        joint, programs = self._programs(loss)
        describing = Describing(self.found, joint, loss, self.asks)
        programs[0] = describing.without_unused(programs[0])
        lifted = [self.constants.lift(with_names(p)) for p in programs]
        signature = describing.signature(self.takes, tuple(names for _, names in lifted), self.constants)
        for name, t in describing.tensors.items():
            self.tensors.setdefault(name, t)
        self.found.recording.release()
        return Stage(tuple(p for p, _ in lifted), signature)

    def _programs(self, loss: int | None) -> tuple[Joint, list[Program]]:
        joint = self.found.joint
        if not self.wants:
            return joint, [forward_program(joint, SavedSet(), inference=True)]
        value = None
        if loss is not None:
            joint, value = self._narrowed(loss)
        if self.partition is None:
            program = joint.program
            return joint, [program if value is None else with_one(program, value)]
        joint = replace(joint, options=replace(joint.options, partition=self.partition))
        parts = split(joint)
        return joint, [parts.forward, *(p for p in parts.backwards if p is not None)]

    def _narrowed(self, loss: int) -> tuple[Joint, Value]:
        made = of_loss(self.found, UserOutput(loss))
        if made is None:  # it may be a view, which has no tangent of its own
            self.recorder.copied = loss
            self.found.recording.release()
            self.found = self.recorder.record()
            made = of_loss(self.found, UserOutput(self.found.left.outputs))
        if made is None:
            path = list(paths(self.found.left.returns))[loss] or "the result"
            raise CaptureError(f"The loss ({path}) does not require grad: nothing can be differentiated.")
        if type(made[1]) is not Value:
            raise InvalidOption(
                f"loss={self.asked!r} is a tensor subclass: return a plain tensor as the loss."
            )
        count = 1
        for n in made[1].size():
            count = count * n if isinstance(n, int) else count
        if count != 1:
            raise InvalidOption(f"loss={self.asked!r} is no single number: its size is {made[1].size()}.")
        return made

    def state(self) -> dict[str, Tensor]:
        """Copies of all held tensors that are there: what shares memory does so again."""
        tensors = {**self.tensors, **self.constants.tensors}
        return copies({name: t for name, t in tensors.items() if name not in self.later})


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, parameters as such; those that share memory do so again."""
    groups: dict[Any, list[str]] = {}
    for name, t in tensors.items():
        groups.setdefault(storage_of(t), []).append(name)
    made: dict[str, Tensor] = {}
    for names in groups.values():
        group = [tensors[name] for name in names]
        if len(group) == 1:
            found = [group[0].detach().clone()]
        else:
            memory = group[0].untyped_storage().clone()
            found = [_in(memory, t) for t in group]
        for name, t, new in zip(names, group, found, strict=True):
            made[name] = nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
            made[name].requires_grad_(t.requires_grad)
    return {name: made[name] for name in tensors}


def _in(memory: Any, t: Tensor) -> Tensor:
    new = torch.empty(0, dtype=t.dtype, device=t.device)
    return new.set_(memory, t.storage_offset(), t.size(), t.stride())

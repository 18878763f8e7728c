"""Partition functions of the caller's own: they are given the joint graph and return two graphs.

    def partition_fn(joint, inputs, *, num_fwd_outputs, static_lifetime_input_indices=None):
        ...
        return forward_module, backward_module

The joint graph takes `primals_N` and `tangents_N` and returns the forward's outputs, then one
gradient per primal. The forward returns its outputs, then the tensors and then the sizes that it
keeps; the backward takes the sizes, the tensors and the tangents.

What a partition function keeps may be an input, or a view of one, that the call itself changes. The
backward wants it as it was: a copy is kept instead, made before the change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from aheadgrad.conventions import in_graph
from aheadgrad.errors import InvalidProgram
from aheadgrad.partition.copies import keep_copies
from aheadgrad.partition.split import SavedSet, SavedValue, SplitPrograms
from aheadgrad.program.opened import opened
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Saved, SavedSize, Signature, Slot
from aheadgrad.torchlayer.fxcode import takes_two_lists
from aheadgrad.torchlayer.subclasses import values_of
from aheadgrad.torchlayer.symbols import is_symbolic

if TYPE_CHECKING:
    from aheadgrad.recording.captured import Captured

PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True, eq=False)
class GivenProgram(Program):
    """A program whose module someone else made."""

    made: fx.GraphModule | None = None

    @property
    def module(self) -> fx.GraphModule:
        assert self.made is not None
        return self.made


def split_with(partition_fn: PartitionFn, captured: Captured) -> SplitPrograms:
    """Lets the caller's function split the joint graph, and checks what comes back."""
    gradients = captured.gradients[0]
    assert gradients is not None
    joint = captured.program
    exits = len(opened(in_graph.results(captured, inference=False)))
    inputs = joint.example_inputs()
    primals, tangents = inputs[: len(captured.inputs)], inputs[len(captured.inputs) :]
    outputs = joint.results
    takes_two_lists(joint.module, primals, tangents, (outputs[:exits], outputs[exits:]))
    forward, backward = partition_fn(
        joint.module, (primals, tangents), num_fwd_outputs=exits, static_lifetime_input_indices=[]
    )
    copied = keep_copies(forward, backward, exits, _changed(captured))
    saved = _saved(captured, forward, exits, copied)
    programs = (
        _forward(captured, joint, forward, saved, exits),
        _backward(joint, backward, saved, exits, len(primals)),
    )
    return SplitPrograms(programs[0], [programs[1]], [saved], saved, [gradients])


def _results(module: fx.GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _changed(captured: Captured) -> set[int]:
    """Which of the program's inputs the call changes, or lets a tensor subclass change."""
    ids = {
        id(value)
        for f in captured.facts.inputs
        if f.index >= 0 and (f.data_changed or f.storage_changed)
        for value in values_of(captured.session.entrances[f.index].value)
    }
    return {i for i, (_, value) in enumerate(captured.inputs) if id(value) in ids}


def _saved(captured: Captured, forward: fx.GraphModule, exits: int, copied: set[str]) -> SavedSet:
    """What the forward returns beyond its outputs: tensors, then sizes."""
    copies = copied | {copy.name for copy in captured.cutter.copies.values()}
    tensors: list[SavedValue] = []
    sizes: list[tuple[str, Any]] = []
    for node in _results(forward)[exits:]:
        if not isinstance(node, fx.Node):
            raise InvalidProgram(f"The partition function's forward keeps {node!r}, which no op made.")
        value = node.meta.get("val")
        if is_symbolic(value) or isinstance(value, int | float):
            sizes.append((node.name, value))
        elif sizes or not isinstance(value, Tensor):
            what = "a tensor after a size" if sizes else f"a value of unknown kind ({value!r})"
            raise InvalidProgram(
                f"The partition function's forward keeps {what}: {node}. It returns its outputs, then "
                'tensors, then sizes; each node needs its value in meta["val"].'
            )
        else:
            reason = "kept by the partition function"
            tensors.append(SavedValue(value, node.name, reason, node.name in copies))
    return SavedSet(tuple(tensors), tuple(sizes))


def _forward(
    captured: Captured, joint: Program, module: fx.GraphModule, saved: SavedSet, exits: int
) -> Program:
    slots: list[Slot] = list(joint.signature.outputs[:exits])
    slots += [Saved(s.name, s.reason) for s in saved.tensors]
    slots += [SavedSize(name) for name, _ in saved.sizes]
    given = joint.signature.inputs[: len(captured.inputs)]
    return _program("forward", module, given, tuple(slots))


def _backward(joint: Program, module: fx.GraphModule, saved: SavedSet, exits: int, primals: int) -> Program:
    slots: list[Slot] = [SavedSize(name) for name, _ in saved.sizes]
    slots += [Saved(s.name, s.reason) for s in saved.tensors]
    slots += joint.signature.inputs[primals:]
    return _program("backward", module, tuple(slots), joint.signature.outputs[exits:])


def _program(
    role: str, module: fx.GraphModule, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...]
) -> Program:
    constants = {
        str(n.target): _attribute(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"
    }
    program = GivenProgram(role, module.graph, Signature(inputs, outputs), constants, module)
    taken, returned = len(program.placeholders), len(program.results)
    if taken != len(inputs) or returned != len(outputs):
        raise InvalidProgram(
            f"The partition function's {role} takes {taken} values and returns {returned}; it should take "
            f"{len(inputs)} ({_names(inputs)}) and return {len(outputs)} ({_names(outputs)})."
        )
    return program


def _names(slots: tuple[Slot, ...]) -> str:
    return ", ".join(s.describe() for s in slots)


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found

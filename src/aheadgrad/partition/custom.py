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
from typing import Any

from torch import Tensor, fx

from aheadgrad.errors import InvalidProgram
from aheadgrad.joint.level import Joint
from aheadgrad.partition.copies import keep_copies
from aheadgrad.partition.saved import SavedSet, SavedValue, Split
from aheadgrad.program.doors import example_inputs, module_of, program_of, type_of
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Slot
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.fake import FakeTensorMode
from aheadgrad.torchlayer.fxcode import takes_two_lists
from aheadgrad.torchlayer.symbols import frozen_number, is_symbolic

PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def split_with(partition_fn: PartitionFn, joint: Joint, mode: FakeTensorMode | None) -> Split:
    """Lets the caller's function split the joint graph, and checks what comes back."""
    program = joint.program
    exits, count = len(joint.results(inference=False)), len(joint.inputs)
    module, given = joint_of_two_lists(joint, mode)
    forward, backward = partition_fn(module, given, num_fwd_outputs=exits, static_lifetime_input_indices=[])
    changed = {
        i for i, (_, value) in enumerate(joint.inputs) if type(value) is Value and value in joint.changed
    }
    copied = keep_copies(forward, backward, exits, changed)
    saved = _saved(joint, program, _results(forward)[exits:], copied)
    kept: list[Slot] = [slot for slot, _ in saved.outputs]
    sizes, tensors = kept[len(saved.tensors) :], kept[: len(saved.tensors)]
    taken, returned = program.signature.inputs, program.signature.outputs
    programs = (
        program_of("forward", forward, taken[:count], (*returned[:exits], *kept)),
        program_of("backward", backward, (*sizes, *tensors, *taken[count:]), returned[exits:]),
    )
    return Split(programs[0], (programs[1],), (saved,), saved, joint.gradients)


def joint_of_two_lists(
    joint: Joint, mode: FakeTensorMode | None = None
) -> tuple[fx.GraphModule, tuple[list[Any], list[Any]]]:
    """The joint graph: `(primals, tangents) -> (outputs, gradients)`; and examples of its inputs."""
    module = module_of(joint.program, mode)
    inputs, results = example_inputs(module), _results(module)
    count, exits = len(joint.inputs), len(joint.results(inference=False))
    given = inputs[:count], inputs[count:]
    takes_two_lists(module, *given, (results[:exits], results[exits:]))
    return module, given


def _results(module: fx.GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _saved(joint: Joint, program: Program, kept: list[Any], copied: set[str]) -> SavedSet:
    """What the forward returns beyond its outputs: tensors, then sizes. Values are known by their names."""
    copies = copied | {copy.name for copy in joint.tape.copies.values()}
    known = {v.name: v for op in program.ops for v in op.values}
    known.update({copy.name: copy.value for copy in joint.tape.copies.values()})
    known.update({p.name: p.value for p in program.inputs if type(p.value) is Value})
    tensors: list[SavedValue] = []
    sizes: list[tuple[str, Any]] = []
    for node in kept:
        if not isinstance(node, fx.Node):
            raise InvalidProgram(f"The partition function's forward keeps {node!r}, which no op made.")
        value = node.meta.get("val")
        if is_symbolic(value) or isinstance(value, int | float):
            sizes.append((node.name, frozen_number(value) if is_symbolic(value) else value))
        elif sizes or not isinstance(value, Tensor):
            what = "a tensor after a size" if sizes else f"a value of unknown kind ({value!r})"
            raise InvalidProgram(
                f"The partition function's forward keeps {what}: {node}. It returns its outputs, then "
                'tensors, then sizes; each node needs its value in meta["val"].'
            )
        else:
            one = known.get(node.name) or Value(-1, type_of(value), node.name)
            reason = "kept by the partition function"
            tensors.append(SavedValue(one, node.name, reason, node.name in copies))
    return SavedSet(tuple(tensors), tuple(sizes))

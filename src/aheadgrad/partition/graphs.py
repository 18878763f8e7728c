"""The default partition on a bare joint graph, for partition functions that build on it.

The same rule as for programs (`choose`), behind a door: the graph is read, split, and two graphs are made.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from aheadgrad.joint.level import Component, Gradients
from aheadgrad.partition.choose import choose
from aheadgrad.program.cut import Cutter
from aheadgrad.program.doors import GraphReader, example_inputs, module_of
from aheadgrad.program.slots import Slot
from aheadgrad.program.values import Port, Value
from aheadgrad.torchlayer.fake import mode_of


def default_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    static_lifetime_input_nodes: Any = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph into a forward and a backward module."""
    read = GraphReader(joint_module)
    ports = [Port(Slot(), value, name) for name, value in read.inputs]
    tangents = [p for p in ports if p.name.startswith("tangents")]
    primals = [p for p in ports if not p.name.startswith("tangents")]
    outputs, grads = read.results[:num_fwd_outputs], read.results[num_fwd_outputs:]
    tape = read.tape({p.value for p in tangents if type(p.value) is Value})
    changed = [op.args[0] for op in tape.ops if op.phase == "write"]
    cutter = Cutter(tape)
    known = tuple(p.value for p in tangents)
    gradients = Gradients(Component(0, (), (), ()), known, tuple(grads), "backward 1", True)
    saved = choose(cutter, primals, outputs, gradients, changed, moves=True)
    leaving = [*((Slot(), v) for v in outputs), *saved.outputs]
    ahead = cutter.cut("forward", primals, leaving, {"forward", "write"})
    behind = cutter.cut("backward", [*saved.ports, *tangents], [(Slot(), g) for g in grads], {"backward 1"})
    mode = mode_of(example_inputs(joint_module))
    return module_of(ahead, mode), module_of(behind, mode)

"""The partitions on a bare joint graph, for partition functions that build on them.

The same rules as for programs (`choose`), behind a door: the graph is read, split, and two graphs are made.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from aheadgrad.joint.level import Component, Gradients
from aheadgrad.options import Options
from aheadgrad.partition.choose import choose, make_table
from aheadgrad.partition.plan import DEFAULT, Demands, demands_of
from aheadgrad.program.cut import Cutter
from aheadgrad.program.doors import GraphReader, example_inputs, module_of
from aheadgrad.program.slots import Slot, Tangent
from aheadgrad.program.values import Port, Value
from aheadgrad.torchlayer.collection import no_collection
from aheadgrad.torchlayer.fake import mode_of


def default_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    static_lifetime_input_nodes: Any = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph into a forward and a backward module: all that the backward uses is saved."""
    return _partition(joint_module, num_fwd_outputs, DEFAULT)


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    static_lifetime_input_nodes: Any = None,
    memory: str = "usual",
    memory_budget: float | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph so that little is saved: cheap values are computed again in the backward."""
    options = Options(partition="min_cut", memory=memory, memory_budget=memory_budget)  # type: ignore[arg-type]
    return _partition(joint_module, num_fwd_outputs, demands_of(options))


@no_collection()
def _partition(
    joint_module: fx.GraphModule, num_fwd_outputs: int, demands: Demands
) -> tuple[fx.GraphModule, fx.GraphModule]:
    read = GraphReader(joint_module)
    ports = [Port(Slot(), value, name) for name, value in read.inputs]
    tangents = [Port(Tangent(Slot()), p.value, p.name) for p in ports if p.name.startswith("tangents")]
    primals = [p for p in ports if not p.name.startswith("tangents")]
    outputs, grads = read.results[:num_fwd_outputs], read.results[num_fwd_outputs:]
    tape = read.tape({p.value for p in tangents if type(p.value) is Value})
    changed = [op.args[0] for op in tape.ops if op.phase == "write"]
    cutter = Cutter(tape)
    known = tuple(p.value for p in tangents)
    gradients = Gradients(Component(0, (), (), ()), known, tuple(grads), "backward 1", True)
    table = make_table(cutter, primals, outputs, gradients, changed, moves=True, once=True)
    saved = choose(table, primals, demands)
    leaving = [*((Slot(), v) for v in outputs), *saved.outputs]
    ahead = cutter.cut("forward", primals, leaving, {"forward", "write"})
    behind = cutter.cut(
        "backward",
        [*saved.ports, *tangents],
        [(Slot(), g) for g in grads],
        {"backward 1"},
        late=demands.cuts,
    )
    mode = mode_of(example_inputs(joint_module))
    return module_of(ahead, mode, read.fakes), module_of(behind, mode, read.fakes)

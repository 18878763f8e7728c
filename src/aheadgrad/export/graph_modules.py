"""Programs of an export as FX graphs that say what they mean, and changed graphs taken back.

    module = exported.graph_module
    for node in module.graph.find_nodes(op="placeholder"):
        print(node.meta["aheadgrad"])            # parameter weight
    changed = exported.from_graph_module(module)

`node.meta["aheadgrad"]` is a `Described` on placeholders and a list of them on the output node.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.errors import InvalidProgram
from aheadgrad.program.check import check
from aheadgrad.program.cut import Cutter
from aheadgrad.program.doors import GraphReader, module_of
from aheadgrad.program.program import Program
from aheadgrad.program.show import type_text
from aheadgrad.program.slots import Saved, Slot
from aheadgrad.program.values import Op, Port, Value
from aheadgrad.torchlayer.fxmeta import fill_in_values

META = "aheadgrad"
_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True)
class Described:
    """Which input or output of the program a node is, and what it means."""

    index: int
    slot: Slot

    def __str__(self) -> str:
        return self.slot.describe()


def described_module(program: Program) -> fx.GraphModule:
    return described(module_of(program), program)


def described(module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """The graph of a program, with what its placeholders and outputs are."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for i, (node, port) in enumerate(zip(placeholders, program.inputs, strict=True)):
        node.meta[META] = Described(i, port.slot)
    outputs = [Described(i, slot) for i, (slot, _) in enumerate(program.outputs)]
    module.graph.output_node().meta[META] = outputs
    return module


def program_from(module: fx.GraphModule, known: Program) -> Program:
    """A changed graph of a program as a program: it takes and gives the same. Inputs that it does not use may
    be gone, and be in another order."""
    nodes = list(module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    numbers = [_number(n, known) for n in placeholders]
    if len(set(numbers)) < len(numbers):
        raise InvalidProgram("Two placeholders of the graph are described as the same input.")
    read = _read(module)
    if len(read.results) != len(known.outputs):
        raise InvalidProgram(
            f"The graph returns {len(read.results)} values; the program returns {len(known.outputs)}: "
            f"{', '.join(slot.describe() for slot, _ in known.outputs)}."
        )
    slots = [slot for slot, _ in known.outputs]
    was = _shared(known.ops, [p.value for p in known.inputs], slots, [value for _, value in known.outputs])
    now = _shared(read.ops, [value for _, value in read.inputs], slots, read.results)
    if now - was:  # a pass did without copies that the signature promises
        read = _read(_with_copies(module, now - was))
    found = dict(zip(numbers, read.inputs, strict=True))
    ports = []
    for i, port in enumerate(known.inputs):
        name, value = found.get(i, (port.name, port.value))
        _same_type(value, port.value, port.slot)
        ports.append(Port(port.slot, value, name, port.static))
    outputs = []
    for (slot, was), value in zip(known.outputs, read.results, strict=True):
        _same_type(value, was, slot)
        outputs.append((slot, value))
    tape = read.tape(set())
    phases = {op.phase for op in tape.ops}
    return check(Cutter(tape).cut(known.role, ports, outputs, phases))


def _read(module: fx.GraphModule) -> GraphReader:
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(attrgetter(str(node.target))(module), Tensor):
            raise InvalidProgram(
                f"The graph has a tensor of its own ({node.target}), and an export holds tensors by name. "
                "Let the function that you export hold it, or make it in the graph (aten.full, aten.arange)."
            )
    try:
        fill_in_values(module)
    except Exception as error:  # whatever an op does not like
        raise InvalidProgram(
            f"The graph cannot be run on tensors as the export takes them: {error}"
        ) from error
    return GraphReader(module)


def _shared(
    ops: Sequence[Op], inputs: Sequence[Any], slots: Sequence[Slot], results: Sequence[Any]
) -> set[int]:
    """Which results are in the memory of an input, or of a result before them."""
    viewed = {v: op.viewed for op in ops for v in op.values}
    seen = {v for v in inputs if type(v) is Value}
    found = set()
    for i, (slot, value) in enumerate(zip(slots, results, strict=True)):
        if type(value) is not Value or isinstance(slot, Saved):
            continue
        while (source := viewed.get(value)) is not None:
            value = source
        if value in seen:
            found.add(i)
        seen.add(value)
    return found


def _with_copies(module: fx.GraphModule, which: set[int]) -> fx.GraphModule:
    """The graph with these results copied."""
    graph = deepcopy(module.graph)
    output = graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        for i in which:
            returned[i] = graph.call_function(_CLONE, (returned[i],))
    output.args = (tuple(returned),)
    return fx.GraphModule(module, graph)


def _number(node: fx.Node, known: Program) -> int:
    """Which input a placeholder is."""
    told = node.meta.get(META)
    if not isinstance(told, Described):
        raise InvalidProgram(
            f"The placeholder {node.name} has no description in node.meta[{META!r}]: start from "
            "exported.graph_module, and keep the meta of its placeholders."
        )
    if not 0 <= told.index < len(known.inputs) or known.inputs[told.index].slot != told.slot:
        raise InvalidProgram(f"The placeholder {node.name} ({told}) is no input of this program.")
    return told.index


def _same_type(value: Any, was: Any, slot: Slot) -> None:
    if type(was) is not Value:
        if isinstance(value, Value | Tensor) or (was is None) != (value is None):
            raise InvalidProgram(f"{slot.describe()} was {was!r}, and is {value!r} in the graph.")
        return
    look = None if type(value) is not Value else (value.type.dtype, value.type.size, value.type.device)
    if look != (was.type.dtype, was.type.size, was.type.device):
        now = type_text(value) if type(value) is Value else repr(value)
        raise InvalidProgram(f"{slot.describe()} was {type_text(was)}, and is {now} in the graph.")

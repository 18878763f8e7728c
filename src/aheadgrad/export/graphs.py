"""Programs of an export as FX graphs that say what they mean, and changed graphs taken back.

    module = exported.graph_module
    for node in module.graph.find_nodes(op="placeholder"):
        print(node.meta["aheadgrad"])            # parameter weight
    changed = exported.from_graph_module(module)

`node.meta["aheadgrad"]` is a `Described` on placeholders and a list of them on the output node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from aheadgrad.errors import InvalidProgram
from aheadgrad.program.check import check
from aheadgrad.program.cut import Cutter
from aheadgrad.program.doors import GraphReader, module_of
from aheadgrad.program.program import Program
from aheadgrad.program.show import type_text
from aheadgrad.program.slots import Slot
from aheadgrad.program.values import Port, Value
from aheadgrad.torchlayer.fxmeta import fill_in_values

META = "aheadgrad"


@dataclass(frozen=True)
class Described:
    """Which input or output of the program a node is, and what it means."""

    index: int
    slot: Slot

    def __str__(self) -> str:
        return self.slot.describe()


def described_module(program: Program) -> fx.GraphModule:
    module = module_of(program)
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
    fill_in_values(module)
    read = GraphReader(module)
    found = {i: (name, value) for i, (name, value) in zip(numbers, read.inputs, strict=True)}
    if len(read.results) != len(known.outputs):
        raise InvalidProgram(
            f"The graph returns {len(read.results)} values; the program returns {len(known.outputs)}: "
            f"{', '.join(slot.describe() for slot, _ in known.outputs)}."
        )
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

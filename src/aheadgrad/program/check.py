"""The checker beside the structure: is this program well formed and functional?

check(program)      # raises InvalidProgram, with the nodes around the fault
"""

from __future__ import annotations

from torch import fx

from aheadgrad.errors import InvalidProgram
from aheadgrad.program.program import Program
from aheadgrad.program.slots import UpdatedInput
from aheadgrad.torchlayer.dispatch import is_mutable, is_random

# Writes that may stand in a program: an input's own update, kept inside the graph on purpose.
_ALLOWED_WRITES = {"aten::copy_", "aten::set_", "inductor::resize_storage_bytes_"}


def check(program: Program) -> Program:
    """Returns the program; raises InvalidProgram when it breaks a rule."""
    slots, places = program.signature.inputs, program.placeholders
    if len(slots) != len(places):
        _fail(program, None, f"{len(places)} placeholders for {len(slots)} input slots")
    if len(program.results) != len(program.signature.outputs):
        _fail(program, None, f"{len(program.results)} results for {len(program.signature.outputs)} slots")
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                _fail(program, node, f"uses {used} before it is made")
        seen.add(node)
        if node.op == "call_function" and is_mutable(node.target) and not is_random(node.target):
            name = node.target._schema.name
            if name not in _ALLOWED_WRITES:
                _fail(program, node, f"{name} changes its argument; programs are functional")
    if program.role == "backward" and program.signature.outputs_of(UpdatedInput):
        _fail(program, None, "a backward does not update inputs")
    return program


def _fail(program: Program, node: fx.Node | None, why: str) -> None:
    nodes = list(program.graph.nodes)
    at = nodes.index(node) if node is not None else len(nodes) - 1
    around = "\n".join(
        f"{'>>' if n is node else '  '} {n.format_node()}" for n in nodes[max(0, at - 5) : at + 5]
    )
    raise InvalidProgram(f"The {program.role} program is not well formed: {why}.\n{around}")

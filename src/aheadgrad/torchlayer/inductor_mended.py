"""What Inductor's own compile leaves out.

Where loops of a kernel are made alike (2.13), that a buffer was changed in place: what reads it could run
before the change. Where a kernel of eager's lays its result out in another way than torch says, a copy. And
that random numbers are drawn in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import fx

from aheadgrad.torchlayer.dispatch import is_random


@contextmanager
def mended() -> Iterator[None]:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import ExternKernel, MultiOutput
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    recompute, check = SchedulerNode.recompute_size_and_body, ExternKernel.codegen_size_asserts
    lower = GraphLowering.run_node
    drawn: dict[Any, list[str]] = {}  # by graph: buffers of what has been drawn

    def recompute_all(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    def lay_out(self: Any, wrapper: Any) -> None:
        before = len(wrapper.lines)
        check(self, wrapper)
        if len(wrapper.lines) > before and not V.graph.cpp_wrapper:
            look = map(wrapper.codegen_shape_tuple, (self.get_size(), self.get_stride()))
            wrapper.lines[before:] = _laid_out(self.get_name(), self.get_op_name(), *look)

    def lower_in_order(self: Any, node: fx.Node) -> Any:
        before = len(self.operations)
        found = lower(self, node)
        if draws(node.target):
            for op in self.operations[before:]:
                if isinstance(op, ExternKernel) and not isinstance(op, MultiOutput):
                    known = drawn.setdefault(self, [])
                    self.additional_buffer_deps[op.get_operation_name()].update(known)
                    known.append(op.get_name())
        return found

    with (
        patch.object(SchedulerNode, "recompute_size_and_body", recompute_all),
        patch.object(ExternKernel, "codegen_size_asserts", lay_out),
        patch.object(GraphLowering, "run_node", lower_in_order),
    ):
        yield


def draws(target: Any) -> bool:
    """Does an op move the state of a random generator?"""
    from torch._prims.rng_prims import run_and_save_rng_state

    return target is run_and_save_rng_state or is_random(target)


def _laid_out(name: str, op: str, size: str, stride: str) -> list[str]:
    """Lines of generated code: a result is copied if it is laid out in another way than Inductor was told."""
    new = f"torch.empty_strided({size}, {stride}, dtype={name}.dtype, device={name}.device)"
    return [
        "try:",
        f"    assert_size_stride({name}, {size}, {stride}, {op!r})",
        "except AssertionError:",
        f"    assert_size_stride({name}, {size}, {name}.stride(), {op!r})",
        f"    {name} = {new}.copy_({name})",
    ]

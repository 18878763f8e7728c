"""torch's own AOTAutograd with trivial compilers: the peer, imported here and nowhere else."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch._functorch.config as config
import torch._inductor.lowering  # noqa: F401  (its decompositions ask for it)
from functorch.compile import (
    aot_function,
    aot_module,
    default_partition,
    min_cut_rematerialization_partition,
    nop,
)
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table


def compile_module(model: nn.Module) -> nn.Module:
    return aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition)


def compile_function(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return aot_function(fn, fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition)


def joint_graph(model: nn.Module, inputs: tuple[Tensor, ...], *, decomposed: bool) -> tuple[Any, Any, int]:
    """The peer's joint graph, its inputs, and the number of the forward's outputs."""
    found: list[Any] = []

    class Enough(Exception):
        pass

    def keep(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append((joint, joint_inputs, num_fwd_outputs))
        raise Enough

    table = select_decomp_table() if decomposed else None
    compiled = aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=keep, decompositions=table)
    with suppress(Enough):
        compiled(*inputs)
    return found[0]


def partition(joint: Any, inputs: Any, exits: int, budget: float = 1.0) -> tuple[Any, Any]:
    """The peer's min-cut; it changes the graph that it is given."""
    with config.patch(activation_memory_budget=budget):
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=exits)


def joint_nodes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """How many nodes the peer's joint graph has."""
    count = 0

    def counting_partition(joint: Any, joint_inputs: Any, **options: Any) -> Any:
        nonlocal count
        count = len(joint.graph.nodes)
        return default_partition(joint, joint_inputs, **options)

    aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=counting_partition)(*inputs)
    return count

"""torch's own AOTAutograd with trivial compilers: the peer, imported here and nowhere else."""

from collections.abc import Callable
from typing import Any

from functorch.compile import aot_function, aot_module, default_partition, nop
from torch import Tensor, nn


def compile_module(model: nn.Module) -> nn.Module:
    return aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition)


def compile_function(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return aot_function(fn, fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition)


def joint_nodes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """How many nodes the peer's joint graph has."""
    count = 0

    def counting_partition(joint: Any, joint_inputs: Any, **options: Any) -> Any:
        nonlocal count
        count = len(joint.graph.nodes)
        return default_partition(joint, joint_inputs, **options)

    aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=counting_partition)(*inputs)
    return count

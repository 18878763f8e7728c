"""FX graph modules with a calling convention of their own."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from aheadgrad.torchlayer import trees as pytree


def takes_two_lists(
    module: fx.GraphModule, first: list[Any], second: list[Any], outputs: tuple[Any, Any]
) -> None:
    """Makes a flat graph callable as `module(primals, tangents) -> (outputs, gradients)`."""
    in_spec = pytree.tree_structure(((first, second), {}))
    out_spec = pytree.tree_structure(outputs)
    module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(["primals", "tangents"], in_spec, out_spec)))
    module.recompile()

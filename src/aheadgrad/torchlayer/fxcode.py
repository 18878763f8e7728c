"""FX graph modules with a calling convention of their own."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from aheadgrad.torchlayer import trees as pytree


def module_with(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module whose code is written when it is first asked for."""
    return _LazyGraphModule(root, graph, class_name="GraphModule")


def takes_two_lists(
    module: fx.GraphModule, first: list[Any], second: list[Any], outputs: tuple[Any, Any]
) -> None:
    """Makes a flat graph callable as `module(primals, tangents) -> (outputs, gradients)`."""
    in_spec = pytree.tree_structure(((first, second), {}))
    out_spec = pytree.tree_structure(outputs)
    module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(["primals", "tangents"], in_spec, out_spec)))
    module.recompile()

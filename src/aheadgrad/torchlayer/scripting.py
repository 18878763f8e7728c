"""TorchScript as a compiler of FX graphs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import fx

from aheadgrad.torchlayer.dispatch import OpOverload

_TO_COPY = torch.ops.aten._to_copy


def scripted(module: fx.GraphModule) -> Any:
    """The graph as a frozen TorchScript module (it knows ops by name, not by overload)."""
    module = copy.copy(module)
    module.graph = copy.deepcopy(module.graph)
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            node.target = node.target.overloadpacket
        if node.target is _TO_COPY and len(node.args) == 1 and set(node.kwargs) == {"dtype"}:
            node.target = torch.ops.aten.to
        node.kwargs = {k: v.type if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
    module.recompile()
    before = torch._C._jit_set_autocast_mode(False)
    try:
        with warnings.catch_warnings():  # about annotations in fx.GraphModule itself
            warnings.filterwarnings("ignore", "The TorchScript type system", UserWarning)
            return torch.jit.freeze(torch.jit.script(module).eval())
    finally:
        torch._C._jit_set_autocast_mode(before)

"""A program: an FX graph, the constants it refers to, and its signature."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from aheadgrad.program.slots import Signature


@dataclass(frozen=True, eq=False)
class Program:
    """`graph` takes one placeholder per input slot and returns one value per output slot."""

    role: str
    graph: fx.Graph
    signature: Signature
    constants: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph as a GraphModule (made on first use: generating its code is not free)."""
        root = torch.nn.Module()
        for name, value in self.constants.items():
            if isinstance(value, torch.Tensor):
                root.register_buffer(name, value, persistent=False)
            else:
                setattr(root, name, value)
        return fx.GraphModule(root, self.graph, class_name="GraphModule")

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def results(self) -> list[Any]:
        output = self.graph.output_node()
        return list(output.args[0])  # type: ignore[arg-type]

    def example_inputs(self) -> list[Any]:
        return [n.meta.get("val") for n in self.placeholders]

    @property
    def code(self) -> str:
        return str(self.module.code)

    def __str__(self) -> str:
        from aheadgrad.program.show import text

        return text(self)

"""A backend of one's own: counts the ops of each program, drops those that do nothing, and runs the graph.

    python examples/own_backend.py

The contract is in docs/backends.md.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.backends.contract import Executable, Request

aten = torch.ops.aten
counted: dict[str, Counter[str]] = {}


@aheadgrad.register_backend("counting")
def counting(request: Request) -> Executable:
    """The module is ours alone: it may be changed."""
    module = request.module
    for node in list(module.graph.nodes):
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    ops = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    counted.setdefault(request.role, Counter()).update(ops)

    def call(args: list[Any]) -> list[Any]:
        results = module(*args)
        args.clear()  # whoever called let go of them
        return list(results)

    return Executable(call)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = aheadgrad.compile(model, backend="counting")
    x = torch.randn(16, 4, requires_grad=True)

    def penalty(run: Any) -> list[Tensor]:
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), list(model.parameters())[:1]))

    for ours, eagers in zip(penalty(compiled), penalty(model), strict=True):
        print(f"largest difference to eager, second order: {float((ours - eagers).abs().max()):.1e}")
    for role, ops in counted.items():
        print(f"{role}: {dict(ops.most_common(4))}")


if __name__ == "__main__":
    main()

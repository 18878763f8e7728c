"""What is wrong with a call, as eager says it.

A kernel that finds an index out of range knows of no IndexError. The program runs again, op by op, and the op
that is to blame raises; where a loss was taken apart, what it says of its targets is said here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aheadgrad.program.doors import module_of
from aheadgrad.program.program import Program

aten = torch.ops.aten


def raise_as_eager(program: Program, given: list[Any]) -> None:
    """Returns if nothing is wrong op by op."""
    again = _Again(module_of(program))
    again.extra_traceback = False
    with torch.no_grad():
        again.run(*given)


class _Again(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except RuntimeError:
            if _is_of_targets(n):
                scores, dim, targets = self.fetch_args_kwargs_from_env(n)[0]
                wrong = targets[(targets < 0) | (targets >= scores.size(dim))]
                if wrong.numel():
                    raise IndexError(f"Target {wrong[0]} is out of bounds.") from None
            raise


def _is_of_targets(node: fx.Node) -> bool:
    """Is this a part of `nll_loss`: the scores of targets, with 0 for those that are ignored?"""
    steps = []
    for target in (aten.gather.default, aten.unsqueeze.default, aten.where.self, aten.ne.Scalar):
        if not isinstance(node, fx.Node) or node.target is not target:
            return False
        steps.append(node)
        node = node.args[2 if target is aten.gather.default else 0]  # type: ignore[assignment]
    return node is steps[2].args[1]

"""Ops of which Inductor makes something else than eager does: they stay eager's own kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.torchlayer.dispatch import OpOverload

_DIVIDES = ("div", "floor_divide", "fmod", "remainder")
_POWERS = [2**n for n in range(10)]
_POOLS = ("avg_pool2d_backward", "avg_pool3d_backward")
aten = torch.ops.aten
WRONG = (aten.multilabel_margin_loss_forward.default,)  # torch's decompositions of these


def multiply_by_zero(graph: fx.Graph) -> None:
    """Inductor takes `x * 0` for 0, which it is not where x is not finite. It does not so with `x * 0.0`."""
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, Tensor) and node.target in (aten.mul.Tensor, aten.mul.Scalar):
            inexact = val.is_floating_point() or val.is_complex()
            if inexact and any(isinstance(a, int) and a == 0 for a in node.args):
                node.args = tuple(0.0 if isinstance(a, int) and a == 0 else a for a in node.args)


def leave_to_eager(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target, val = node.target, node.meta.get("val")
        if isinstance(target, OpOverload) and isinstance(val, Tensor):
            name = target.name().removeprefix("aten::").partition(".")[0]
            if _divides_otherwise(name, node, val) or _forgets_the_edge(name, node) or _rounds(name, node):
                node.meta["should_fallback"] = True


def _divides_otherwise(name: str, node: fx.Node, val: Tensor) -> bool:
    """On a CPU Inductor's whole quotients and remainders are others where something is not finite or large,
    and end the process where a quotient of integers is too large."""
    whole = name in _DIVIDES and (name != "div" or bool(node.kwargs.get("rounding_mode")))
    of_tensors: Any = len(node.args) > 1 and isinstance(node.args[1], fx.Node)
    return whole and val.device.type == "cpu" and (of_tensors or val.is_floating_point())


def _forgets_the_edge(name: str, node: fx.Node) -> bool:
    """With `ceil_mode` the last window of a pool is smaller; Inductor 2.13 divides its gradient as if it were
    whole."""
    return name in _POOLS and len(node.args) > 5 and bool(node.args[5])


def _rounds(name: str, node: fx.Node) -> bool:
    """Which pixel a pixel of a larger picture came from: Inductor looks at the sizes alone, not at the factor
    that was asked for, and needs numbers. Only powers of two are the same either way."""
    if name != "upsample_nearest2d_backward":
        return False
    sizes: Any = node.args
    factors = (*sizes[3:], None, None)
    for large, small, factor in zip(sizes[1], sizes[2][2:], factors, strict=False):
        if not (type(large) is type(small) is int) or large % small or large // small not in _POWERS:
            return True
        if factor is not None and factor != large // small:
            return True
    return False

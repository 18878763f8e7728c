"""Anomaly mode: a backward op by op, to name the line of the forward whose derivative made a NaN.

Eager checks what each autograd node returns. A compiled backward has the ops of many nodes; each op
knows the node that it was recorded in. So what one node's ops make and another's use (or nobody
here: a result) is what eager looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from aheadgrad.torchlayer import random
from aheadgrad.torchlayer.autograd import AutogradNode, number_of, set_grad_enabled
from aheadgrad.torchlayer.transforms import is_batched

if TYPE_CHECKING:
    from aheadgrad.backends.registry import Backend
    from aheadgrad.program.program import Program
    from aheadgrad.runtime.backward import Backward

_AS_STRIDED_SCATTER = torch.ops.aten.as_strided_scatter.default


class NanFound(RuntimeError):
    """What eager raises, and the place in the user's code that the gradient belongs to."""

    def __init__(self, node: AutogradNode, number: int, origin: Any) -> None:
        super().__init__(f"Function '{node.name}' returned nan values in its {number}th output.")
        self.origin = origin


def checked(
    ctx: Any, backward: Backward, saved: list[Any], tangents: tuple[Tensor | None, ...]
) -> list[Any] | None:
    """The gradients, once looked through for NaN; None when they are to be computed as usual."""
    present = [t for t in tangents if t is not None]
    if not torch.is_anomaly_check_nan_enabled() or not present or any(map(is_batched, present)):
        return None
    assert backward.checking is not None
    try:
        if not torch.is_grad_enabled():
            return list(backward.checking.run(saved, tangents))
        set_grad_enabled(False)  # only a look: the gradients need a history
        try:
            with random.preserved():
                backward.checking.run(saved, tangents)
        finally:
            set_grad_enabled(True)
        return None
    except NanFound as error:
        if error.origin is not None:
            ctx.metadata.setdefault("traceback_", []).append(error.origin.as_traceback())
        raise RuntimeError(*error.args) from None


def looking_for_nan(nodes: set[Any]) -> Backend:
    """A backend whose programs raise `NanFound`; `nodes` are those of the forward."""

    def backend(program: Program) -> Callable[[list[Any]], list[Any]]:
        phase = _last_phase(program)
        returned = {n for n in program.results if isinstance(n, fx.Node)}
        looked_at = {n for n in program.graph.nodes if _is_gradient(n, phase, returned)}
        return lambda args: _interpret(program, args, looked_at, nodes)

    return backend


def _last_phase(program: Program) -> str | None:
    """The backward that is computed; a program may repeat ops of the orders before."""
    phases = [n.meta["phase"] for n in program.graph.nodes if "phase" in n.meta]
    return max(phases, key=lambda phase: int(phase.split()[-1]), default=None)


def _is_gradient(n: fx.Node, phase: str | None, returned: set[fx.Node]) -> bool:
    node = n.meta.get("autograd_node")
    if node is None or n.meta["phase"] != phase:
        return False
    return n in returned or any(u.meta.get("autograd_node") != node for u in n.users)


def _interpret(program: Program, args: list[Any], looked_at: set[fx.Node], nodes: set[Any]) -> list[Any]:
    env: dict[fx.Node, Any] = dict(zip(program.placeholders, args, strict=True))
    args.clear()
    for n in program.graph.nodes:
        if n.op == "get_attr":
            env[n] = program.constants[str(n.target)]
        elif n.op == "call_function":
            given = list(fx.node.map_arg(n.args, env.__getitem__))
            if n.target is _AS_STRIDED_SCATTER:
                given[0] = given[0].detach()  # its kernel refuses what requires grad, even without grad mode
            env[n] = n.target(*given, **fx.node.map_arg(n.kwargs, env.__getitem__))
            if n in looked_at and _has_nan(env[n]):
                raise NanFound(n.meta["autograd_node"], _edge(n, nodes), n.meta.get("origin"))
    return [fx.node.map_arg(r, env.__getitem__) for r in program.results]


def _has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.isnan().any())


def _edge(n: fx.Node, nodes: set[Any]) -> int:
    """Which of its node's gradients a value is, as far as its users tell."""
    own = n.meta["autograd_node"].number
    node = next((m for m in nodes if number_of(m) == own), None)
    if node is None:
        return 0
    edges = [(i, number_of(m)) for i, (m, _) in enumerate(node.next_functions) if m is not None]
    users = {u.meta["autograd_node"].number for u in n.users if "autograd_node" in u.meta}
    return next((i for i, number in edges if number in users), edges[0][0] if edges else 0)

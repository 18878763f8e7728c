"""The autograd node of one component, as a class with generated methods.

The forward program has run before the node is applied: the node only adopts its results, keeps
what the backward needs, and hands tangents to the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.conventions.subclasses import tangent_test
from aheadgrad.errors import HigherOrderError
from aheadgrad.runtime.backward import Backward, Failure
from aheadgrad.runtime.emit import Namespace, Script
from aheadgrad.torchlayer.autocast import any_autocast
from aheadgrad.torchlayer.autograd import NodeBase, bare_apply, keeps_graph


def make_node(
    backward: Backward,
    outputs: int,
    saved: int,
    sizes: int,
    inputs: int,
    number: int,
    watched: bool,
    failure: Failure | None = None,
    direct: Direct | None = None,
) -> tuple[Callable[..., Any], str]:
    """`apply(outs, saved, sizes, *inputs) -> outs` for one component, and its source.

    A direct node runs the forward program itself: `apply(*inputs) -> outs`.
    """
    names = Namespace()
    if direct is not None:
        forward, forward_source = direct.write(names)
    else:
        forward, forward_source = _forward(names, outputs, saved, sizes)
    arrange = Arrangement() if direct is None else Arrangement(direct.positions, len(direct.inputs))
    if inputs:
        run, backward_source = _backward(names, backward, outputs, sizes, saved + sizes, watched, arrange)
    else:
        run, backward_source = _nowhere_backward(names, watched, failure)
    node = type(
        f"Compiled{number}",
        (NodeBase,),
        {"forward": staticmethod(forward), "backward": staticmethod(run), "__module__": __name__},
    )
    return bare_apply(node), forward_source + "\n" + backward_source


@dataclass(frozen=True)
class Arrangement:
    """Where gradients stand among the values that a backward returns.

    Behind three values that are no tensors; or, for a direct node, at the places of its inputs.
    """

    positions: tuple[int, ...] | None = None
    inputs: int = 0

    def text(self, grads: list[str]) -> str:
        if self.positions is None:
            return f"(None, None, None, {''.join(f'{g}, ' for g in grads)})"
        places = ["None"] * self.inputs
        for position, grad in zip(self.positions, grads, strict=True):
            places[position] = grad
        return f"({''.join(f'{p}, ' for p in places)})"

    def spread(self, grads: list[Any]) -> tuple[Any, ...]:
        if self.positions is None:
            return (None, None, None, *grads)
        places: list[Any] = [None] * self.inputs
        for position, grad in zip(self.positions, grads, strict=True):
            places[position] = grad
        return tuple(places)


@dataclass(frozen=True, eq=False)
class Direct:
    """A node that runs the program itself: for calls that do nothing but compute.

    Inside a node's forward grad mode is off anyway, and nothing has to be carried over.
    """

    inline: Callable[[Script, list[str]], list[str]]
    inputs: tuple[str, ...]
    positions: tuple[int, ...]
    results: int
    views: frozenset[int]
    saved: tuple[str, ...]
    outputs: int

    def write(self, names: Namespace) -> tuple[Any, str]:
        script = Script("node_forward", names)
        values = self.inline(script, list(self.inputs))
        script.line(f"{''.join(f'r{i}, ' for i in range(self.results))}= {', '.join(values)},")
        for i in sorted(self.views):
            script.line(f"r{i} = r{i}.detach()")
        if self.outputs > 1:
            script.line("ctx.set_materialize_grads(False)")
        if self.saved:
            script.line(f"ctx.save_for_backward({', '.join(self.saved)})")
        outs = [f"r{i}" for i in range(self.outputs)]
        script.line(f"return {outs[0] if len(outs) == 1 else ', '.join(outs)}")
        return script.function(", ".join(["ctx", *self.inputs]))


def _forward(names: Namespace, outputs: int, saved: int, sizes: int) -> tuple[Any, str]:
    script = Script("node_forward", names)
    script.line("ctx.set_materialize_grads(False)")
    if saved:
        script.line("ctx.save_for_backward(*saved)")
    if sizes:
        script.line("ctx.sizes = sizes")
    script.line("return outs" if outputs != 1 else "return outs[0]")
    return script.function("ctx, outs, saved, sizes, *inputs")


def _backward(
    names: Namespace,
    backward: Backward,
    outputs: int,
    sizes: int,
    count: int,
    watched: bool,
    arrange: Arrangement,
) -> tuple[Any, str]:
    script = Script("node_backward", names)
    tangents = [f"t{i}" for i in range(outputs)]
    with script.block(f"if {names.name(torch.is_grad_enabled, 'is_grad_enabled')}():"):
        script.line(f"{names.name(_no_higher_order, 'no_higher_order')}()")
    if watched:
        present = ", ".join(f"{t} is not None" for t in tangents)
        script.line(f"{names.name(_check_watched, 'check_watched')}(ctx, ({present},))")
    saved = "[*ctx.sizes, *ctx.saved_tensors]" if sizes else "ctx.saved_tensors"
    if count == sizes:  # asking for saved tensors would raise in a second backward, even if there are none
        saved = "ctx.sizes" if sizes else "()"
    script.line(f"saved = {saved}")
    usual = backward.programs.get((backward.expected, None))
    if usual is not None:
        tests = [
            tangent_test(names, t, expected) for t, expected in zip(tangents, backward.expected, strict=True)
        ]
        if not backward.fixed_autocast:
            tests.append(f"not {names.name(any_autocast, 'any_autocast')}()")
        with script.block(f"if {' and '.join(tests)}:"):
            _usual(script, usual, tangents, count, arrange)
    joined = ", ".join(tangents) + ","
    found = f"{names.name(backward, 'find_backward')}.run(saved, ({joined}))"
    script.line(f"return {names.name(arrange, 'arrange')}.spread({found})")
    return script.function(f"ctx, {', '.join(tangents)}")


def _usual(script: Script, run: Any, tangents: list[str], saved: int, arrange: Arrangement) -> None:
    """All tangents are there and laid out as expected: the program's own lines, where it has them."""
    inline = getattr(run, "inline", None)
    if inline is None:
        call = f"{script.names.name(run, 'backward')}([*saved, {', '.join(tangents)}])"
        script.line(f"return {script.names.name(arrange, 'arrange')}.spread({call})")
        return
    places = [f"s{i}" for i in range(saved)]
    if places:
        script.line(f"{', '.join(places)}, = saved")
    results = inline(script, [*places, *tangents])
    script.line(f"return {arrange.text(results)}")


def _nowhere_backward(names: Namespace, watched: bool, failure: Failure | None) -> tuple[Any, str]:
    """Outputs that require grad although no input is behind them."""
    script = Script("node_backward", names)
    if watched:
        present = "tuple(t is not None for t in tangents)"
        script.line(f"{names.name(_check_watched, 'check_watched')}(ctx, {present})")
    if failure is not None:
        script.line(f"{names.name(failure, 'fails')}([])")
    script.line("return None, None, None, None")
    return script.function("ctx, *tangents")


def _check_watched(ctx: Any, present: tuple[bool, ...]) -> None:
    """Tensors that eager saves and we do not; the caller must not have changed them since."""
    watched: tuple[tuple[Tensor, int, tuple[int, ...]], ...] | None
    watched, once = ctx.watch
    if watched is None and any(present[k] for k in once):
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after "
            "they have already been freed). Specify retain_graph=True if you need to backward through "
            "the graph a second time."
        )
    if not keeps_graph():
        ctx.watch = None, once
    for tensor, expected, outputs in watched or ():
        if tensor._version != expected and any(present[k] for k in outputs):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                f"expected version {expected} instead."
            )


def _no_higher_order() -> None:
    raise HigherOrderError(
        "A second derivative was asked for (backward with create_graph=True) through a compiled "
        "function. This version compiles first derivatives; call the uncompiled function where you "
        "need higher ones."
    )

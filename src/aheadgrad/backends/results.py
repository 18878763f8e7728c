"""What Inductor returns becomes what a program promises: the strides of eager, and values that share memory
as they do in eager.

    return h[0]               # Inductor would return a dense copy: it returns h, of which the view is taken
    x.t_(); return x * x      # what is kept, a view of x, is one of the caller's x: it notices changes
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.backends.contract import Boxed, Request
from aheadgrad.backends.eager import laid_out
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Saved, Slot
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.seen_as import Look, look_of, seen_as

Looks = dict[int, Look]
"""Of results, by position; none with symbols."""


class Results:
    """Of one program, before Inductor compiles its graph and afterwards. `visible` are the places of those
    that others than the backward see; gradients may have any strides."""

    def __init__(self, request: Request, visible: list[int]) -> None:
        self.plain = _leave_out(request)
        self.outside, self.looks = ({}, {}) if request.role == "backward" else _take_outside(request, visible)
        self.otherwise: dict[int, Callable[[Tensor], Tensor]] = {}
        self.twins = _twins(request.program)
        self.parts = _parts_of_inputs(request.program)

    def strides_after(self, strides: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """Given what Inductor says of the strides of its results: what is left of that."""
        if strides is None:
            return None
        self.otherwise = _laid_out_otherwise(self.looks, strides)
        known = self.outside.keys() | self.otherwise.keys()
        return tuple(None if i in known else s for i, s in enumerate(strides))

    def of(self, made: Callable[[list[Any]], Any]) -> Boxed:
        plain, outside, otherwise = self.plain, self.outside, self.otherwise
        twins, parts = self.twins, self.parts

        def run(args: list[Any]) -> list[Any]:
            given = [args[k] for _, k in parts]
            results = list(made(args))
            for i, value in plain:
                results[i] = value
            for i, look in outside.items():
                results[i] = seen_as(results[i], look).detach()
            for i, lay_out in otherwise.items():
                results[i] = lay_out(results[i])
            for i, seen in twins:
                results[i] = _seen_through(results[i], results[seen])
            for (i, _), whole in zip(parts, given, strict=True):
                results[i] = _seen_through(results[i], whole)
            return results

        return run


def _leave_out(request: Request) -> list[tuple[int, Any]]:
    """Inputs that are kept for the backward are kept as they are: Inductor would make copies of them. Neither
    does it know results that are no tensors and no numbers: they are told, with their positions."""
    output = request.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    plain = [(i, v) for i, v in enumerate(results) if not isinstance(v, fx.Node) and v is not None]
    for i, (slot, value) in enumerate(request.program.outputs):
        if isinstance(slot, Saved) and type(value) is Value and value.op is None:
            results[i] = None
    for i, _ in plain:
        results[i] = None
    output.args = (tuple(results),)
    return plain


def _take_outside(request: Request, visible: list[int]) -> tuple[Looks, Looks]:
    """How visible results look; and first those with gaps between their elements, or read as conjugated, as
    views of something computed may be. Inductor makes these dense: the whole is its result, and the view is
    taken of that."""
    output = request.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    outside: Looks = {}
    looks: Looks = {}
    for i in visible:
        whole, t = results[i], results[i].meta["val"]
        while whole.op == "call_function" and is_view_op(whole.target):
            whole = whole.args[0]
        look = look_of(t)
        if any(type(n) is not int for n in (*look.size, *look.stride, look.offset)):
            continue
        simple = _is_dense(t) and not (look.conj or look.neg)
        if whole.op == "placeholder" or simple or not _is_dense(whole.meta["val"]):
            looks[i] = look
        else:
            results[i], outside[i] = whole, look
    output.args = (tuple(results),)
    return outside, looks


def _laid_out_otherwise(looks: Looks, strides: Any) -> dict[int, Callable[[Tensor], Tensor]]:
    """What gives results the strides that they should have, where Inductor gives them others."""
    found: dict[int, Callable[[Tensor], Tensor]] = {}
    for i, (size, stride, *_) in looks.items() if strides is not None else ():
        given = strides[i] or ()
        if tuple(given) == stride or any(type(n) is not int for n in given) or len(given) != len(stride):
            continue
        if all(n == 1 or a == b for n, a, b in zip(size, given, stride, strict=True)):
            found[i] = partial(_strided, size=size, stride=stride)
        else:
            found[i] = partial(laid_out, strides=stride)
    return found


def _strided(t: Tensor, size: Any, stride: Any) -> Tensor:
    """The same memory; no view of autograd's, as no result of a program is one."""
    return t.as_strided(size, stride).detach()


def _is_dense(t: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(t))


def _twins(program: Program) -> list[tuple[int, int]]:
    """Values that are kept and share memory with a result that others see."""
    outputs = _outputs_with_sources(program)
    seen = {source: (i, v) for i, slot, v, source in outputs if not isinstance(slot, Saved)}
    found = ((i, v, seen.get(source)) for i, slot, v, source in outputs if isinstance(slot, Saved))
    return [(i, twin[0]) for i, v, twin in found if twin is not None and twin[1] is not v]


def _parts_of_inputs(program: Program) -> list[tuple[int, int]]:
    """Values that are kept and are views of an input."""
    places = {p.value: k for k, p in enumerate(program.inputs) if type(p.value) is Value}
    outputs = _outputs_with_sources(program)
    return [(i, places[s]) for i, slot, _, s in outputs if isinstance(slot, Saved) and s in places]


def _outputs_with_sources(program: Program) -> list[tuple[int, Slot, Value, Value]]:
    """What was computed (or viewed), each with the value that it is a view of in the end."""
    of = {v: op.viewed for op in program.ops for v in op.values}

    def source(value: Any) -> Any:
        while of.get(value) is not None:
            value = of[value]
        return value

    outputs = [(i, slot, v) for i, (slot, v) in enumerate(program.outputs) if type(v) is Value]
    return [(i, slot, v, source(v)) for i, slot, v in outputs if v.op is not None]


def _seen_through(kept: Tensor, seen: Tensor) -> Tensor:
    """The same value as a view of the result, so that a change of that is noticed in the backward."""
    if kept.untyped_storage().data_ptr() != seen.untyped_storage().data_ptr():
        return kept
    return seen_as(seen.detach(), look_of(kept))

"""What Dynamo knows about the inputs of the graph that it is having compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._ordered_set import OrderedSet

from aheadgrad.torchlayer.dispatch import RELEASE
from aheadgrad.torchlayer.fake import FakeTensor, FakeTensorMode, mode_of
from aheadgrad.torchlayer.subclasses import is_foreign, parts_of
from aheadgrad.torchlayer.symbols import constant_of, is_symbolic, symbolic_numbers

# What Dynamo looks for on inputs; with the older name it checks it at each call as well.
_CHANGES = "_dynamo_propagated_dynamic_indices" if RELEASE >= (2, 13) else "_dynamo_weak_dynamic_indices"
_HOOKS = "AUTOGRAD_SAVED_TENSORS_HOOKS"
_FIXED = (DimDynamic.STATIC, DimDynamic.INFER_STRIDE)


@dataclass(frozen=True, eq=False)
class Symbols:
    """The fake mode that symbolic sizes live in; by id, what stands for tensors in it.

    `items` are the numbers that zero-dimensional tensors stand for: Dynamo passes a Python float
    that changes from call to call as a tensor. `optional`: whoever calls can do without symbols.
    `numbers` are symbols for Python numbers among the flat arguments, by position.
    """

    mode: FakeTensorMode | None = None
    fakes: dict[int, FakeTensor] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)
    optional: bool = False
    numbers: dict[int, Any] = field(default_factory=dict)

    def are_left(self) -> bool:
        """Are there sizes that have not become numbers?"""
        return any(constant_of(n) is None for n in self._sizes())

    def become_numbers(self) -> None:
        """As if sizes were what they are now: who made the symbols asks again for others."""
        for n in self._sizes():
            int(n)
        self.fakes.clear()

    def _sizes(self) -> Iterator[Any]:
        return (n for fake in self.fakes.values() for *_, n in symbolic_numbers(fake))


def dynamos_mode() -> FakeTensorMode | None:
    """The fake mode of the compilation that Dynamo asked for."""
    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def is_static(t: Tensor) -> bool:
    """Does a tensor stay where it is from call to call: a parameter, or one that Dynamo says so of?"""
    return isinstance(t, torch.nn.Parameter | torch.nn.Buffer) or hasattr(t, "_dynamo_static_input_type")


def mark_static(t: Tensor) -> None:
    """Says so of a tensor that stands for such."""
    vars(t)["_dynamo_static_input_type"] = "guarded"


def symbols_of(args: Sequence[Any], graph: fx.Graph | None) -> Symbols:
    """The symbols behind the example inputs: their own, or those that Dynamo has given to them."""
    mode = mode_of(list(args))
    if mode is not None:
        items = {id(a): a.item_memo for a in args if isinstance(a, FakeTensor) and a.item_memo is not None}
        return Symbols(mode, items=items)
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return Symbols()
    fakes = {}
    for value in args:
        if isinstance(value, Tensor) and value in context.tensor_to_context:
            symbolic = context.tensor_to_context[value]
            if _is_free(symbolic):
                fakes[id(value)] = fake = _fake(context.fake_mode, value, symbolic)
                if is_foreign(value):
                    parts = zip(parts_of(value), parts_of(fake), strict=True)
                    fakes.update((id(part), known) for part, known in parts)  # type: ignore[misc]
    items = _items(args, graph)
    if not fakes and not items and not any(map(is_symbolic, args)):
        return Symbols()
    return Symbols(context.fake_mode, fakes, items)


def ignore_hooks_of_saved_tensors() -> None:
    """What hooks on saved tensors there are does not matter to graphs that call them as eager does.

    Dynamo would ask at each call, in Python, for compilers that make such hooks part of the graph.
    """
    context = TracingContext.try_get()
    if context is not None:
        guards = context.guards_context.dynamo_guards
        guards.inner = OrderedSet(g for g in guards.inner if g.create_fn_name() != _HOOKS)


def mark_dynamic(t: Any, dims: tuple[int, ...]) -> None:
    """Lets Dynamo know that these sizes of a result change, for the next function it is given to."""
    if isinstance(t, Tensor):
        vars(t)[_CHANGES] = vars(t).get(_CHANGES, set()) | set(dims)


def _is_free(symbolic: Any) -> bool:
    parts = (*getattr(symbolic, "dynamic_sizes", ()), *getattr(symbolic, "dynamic_strides", ()))
    return any(p not in _FIXED for p in parts)


def _fake(mode: FakeTensorMode, value: Tensor, symbolic: Any) -> FakeTensor:
    source = symbolic.tensor_source
    fake: FakeTensor = mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)
    return fake


def _items(args: Sequence[Any], graph: fx.Graph | None) -> dict[int, Any]:
    found = {}
    for value, node in zip(args, _placeholders(graph), strict=False):
        memo = getattr(node.meta.get("example_value"), "item_memo", None)
        if isinstance(value, Tensor) and memo is not None:
            found[id(value)] = memo
    return found


def _placeholders(graph: fx.Graph | None) -> list[fx.Node]:
    return [] if graph is None else [n for n in graph.nodes if n.op == "placeholder"]

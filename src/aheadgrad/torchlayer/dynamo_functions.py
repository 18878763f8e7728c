"""Custom functions under Dynamo: the backward that was written is noted beside Dynamo's graph of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo import output_graph, variables
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable as Apply

from aheadgrad.torchlayer.written_backward import NOTE, Kept, WrittenBackward

_STEPS = ("trace_backward_graph", "rewire_bwd_graph_outputs", "handle_saved_tensors_wiring")


@contextmanager
def backwards_are_noted() -> Iterator[None]:
    """Inside, Dynamo's graphs of backwards say what was written. It is patched for the time it takes."""
    if not all(hasattr(Apply, name) for name in _STEPS):  # an older torch
        yield
        return
    traced, rewired, wired = (getattr(Apply, name) for name in _STEPS)

    def trace_backward(self: Any, tx: Any, ctx: Any, *args: Any) -> Any:
        with _tracers() as made:
            found = traced(self, tx, ctx, *args)
        tracer = next((t for t in made if t.graph is found[2]), None)
        self.noted = None if tracer is None else _On(ctx, tx, tracer).found()
        return found

    def rewire(self: Any, fwd_freevars: Any, bwd_out: Any, bwd_graph: Any, freevars: Any, args: Any) -> None:
        order = {proxy: k for k, proxy in enumerate(fwd_freevars)}
        self.inputs = [order.get(a.as_proxy()) if a.is_tensor() else None for a in args], len(order)
        rewired(self, fwd_freevars, bwd_out, bwd_graph, freevars, args)

    def wire(self: Any, out: Any, graph: Any, inputs: Any, outputs: Any, bwd: Any, freevars: Any) -> Any:
        result = wired(self, out, graph, inputs, outputs, bwd, freevars)
        places = {proxy: Kept(k) for k, proxy in enumerate(freevars.values())}
        if self.noted is not None and places.keys() >= set(_proxies(self.noted)):
            saved, attributes = (_placed(part, places) for part in self.noted)
            items = out.items if isinstance(out, variables.BaseListVariable) else [out]
            tangents = [next((k for k, o in enumerate(outputs) if o is item), None) for item in items]
            note = WrittenBackward(self.bwd_fn, saved, attributes, tangents, *self.inputs)
            next(iter(result[1].nodes)).meta[NOTE] = note
        return result

    with ExitStack() as stack:
        for name, new in zip(_STEPS, (trace_backward, rewire, wire), strict=True):
            stack.enter_context(patch.object(Apply, name, new))
        yield


@contextmanager
def _tracers() -> Iterator[list[Any]]:
    """The tracers that are made inside."""
    made: list[Any] = []
    init = output_graph.SubgraphTracer.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    with patch.object(output_graph.SubgraphTracer, "__init__", noting):
        yield made


class _On:
    """What a forward left on its `ctx`, as Dynamo knows it; its tensors become inputs of the backward."""

    def __init__(self, ctx: Any, tx: Any, tracer: Any) -> None:
        self.ctx, self.tx, self.tracer = ctx, tx, tracer

    def found(self) -> tuple[Any, Any] | None:
        """Tensors saved, and attributes; with proxies for values."""
        left = self.tx.output.side_effects.store_attr_mutations.get(self.ctx, {})
        try:
            saved = tuple(map(self._value, self.ctx.saved_tensors.tensors))
            return saved, {name: self._value(v) for name, v in left.items()}
        except Exception:  # Dynamo's ways to say no are many
            return None

    def _value(self, v: Any) -> Any:
        v = v.realize()
        if v.is_tensor() or isinstance(v, variables.SymNodeVariable):
            return self.tracer.maybe_lift_tracked_freevar_to_input(v.as_proxy())
        if isinstance(v, variables.BaseListVariable) and v.python_type() in (tuple, list, torch.Size):
            items = tuple(map(self._value, v.items))
            return list(items) if v.python_type() is list else items
        if isinstance(v, variables.ConstDictVariable):
            return {key.vt.as_python_constant(): self._value(item) for key, item in v.items.items()}
        if isinstance(v, variables.UserDefinedObjectVariable) and v.source is not None:
            return v.value  # somebody else's, who has it still
        return v.as_python_constant()


def _proxies(value: Any) -> Iterator[fx.Proxy]:
    if isinstance(value, fx.Proxy):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _proxies(part)


def _placed(value: Any, places: Mapping[fx.Proxy, Kept]) -> Any:
    if isinstance(value, fx.Proxy):
        return places[value]
    if isinstance(value, dict):
        return {key: _placed(v, places) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_placed(v, places) for v in value)
    return value

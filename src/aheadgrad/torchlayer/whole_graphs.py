"""Dynamo asked for the one graph of a function; whatever it cannot do is an error, and nothing runs.

The tensors that it is given are stand-ins, on which no op may run. So no frame is left to eager.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._guards import TracingContext
from torch.fx._symbolic_trace import is_fx_symbolic_tracing as fx_traces

from aheadgrad.errors import FallbackError
from aheadgrad.torchlayer.dispatch import dispatch_restored
from aheadgrad.torchlayer.fake import quiet_logs
from aheadgrad.torchlayer.frames import ONE_AT_A_TIME, call_directly, configured, quickly
from aheadgrad.torchlayer.letting_go import let_go_of_locals

_PARTS = ("forward", "setup_context", "vmap")


class _Whole:
    """Dynamo's conversion of a frame, which has to lead to a graph. (Torch's own helpers may do without.)"""

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback  # Dynamo finds the backend by following this name

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        with ONE_AT_A_TIME, configured({}), dispatch_restored(), quiet_logs():
            try:
                result = self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
            except Exception as error:
                let_go_of_locals(error)
                raise
        if result.guarded_code is not None:
            call_directly(result.guarded_code, frame.f_globals)
        elif str(frame.f_globals.get("__name__")).partition(".")[0] != "torch":
            raise FallbackError(f"Dynamo leaves {frame.f_code.co_name} to eager")
        return result


def whole_graph(fn: Any, backend: Callable[..., Any], dynamic: bool | None, limit: int) -> Callable[..., Any]:
    """What calls `fn` through Dynamo as one graph."""
    options: dict[str, Any] = {"nopython": True, "dynamic": dynamic}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options.update(recompile_limit=limit, isolate_recompiles=True)
    context: Any = torch._dynamo.optimize(backend, **options)
    if not hasattr(context, "callback"):
        return _switched_off
    context.callback = _Whole(context.callback)

    def whole(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    whole.__code__ = whole.__code__.replace(co_name=getattr(fn, "__name__", type(fn).__name__))  # its own
    made = context(whole)
    run = quickly(made, context) or made

    def checked(*args: Any, **kwargs: Any) -> Any:
        if eval_frame._stance != eval_frame.DynamoStance() or torch._C._is_tracing() or fx_traces():
            return _switched_off()
        return run(*args, **kwargs)

    return checked


def _switched_off(*args: Any, **kwargs: Any) -> Any:
    raise FallbackError("Dynamo is switched off")


def uses_custom_functions() -> bool:
    """Has Dynamo walked through the forward of an `autograd.Function`? (It does so where nothing requires
    grad, and forgets what the function has to say about its derivatives.)"""
    context = TracingContext.try_get()
    codes = getattr(context, "traced_code", None)
    if codes is None:
        return True  # nobody knows
    parts = (getattr(kind, name, None) for kind in _functions(torch.autograd.Function) for name in _PARTS)
    return not {getattr(part, "__code__", None) for part in parts}.isdisjoint(codes)


def _functions(kind: Any) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _functions(each)

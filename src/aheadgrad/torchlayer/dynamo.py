"""What Dynamo knows about the inputs of the graph that it is having compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import DimDynamic

from aheadgrad.torchlayer.fake import FakeTensor, FakeTensorMode, mode_of
from aheadgrad.torchlayer.symbols import is_symbolic

_FIXED = (DimDynamic.STATIC, DimDynamic.INFER_STRIDE)


@dataclass(frozen=True, eq=False)
class Symbols:
    """The fake mode that symbolic sizes live in, and (by id) fake versions of tensors that have them."""

    mode: FakeTensorMode | None = None
    fakes: dict[int, FakeTensor] = field(default_factory=dict)


def symbols_of(args: Sequence[Any]) -> Symbols:
    """The symbols behind the example inputs: their own, or those that Dynamo has given to their sizes."""
    mode = mode_of(list(args))
    if mode is not None:
        return Symbols(mode)
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return Symbols()
    chosen = {}
    for value in args:
        if isinstance(value, Tensor) and value in context.tensor_to_context:
            symbolic = context.tensor_to_context[value]
            if _is_free(symbolic):
                chosen[id(value)] = _fake(context.fake_mode, value, symbolic)
    if not chosen and not any(map(is_symbolic, args)):
        return Symbols()
    return Symbols(context.fake_mode, chosen)


def _is_free(symbolic: Any) -> bool:
    parts = (*getattr(symbolic, "dynamic_sizes", ()), *getattr(symbolic, "dynamic_strides", ()))
    return any(p not in _FIXED for p in parts)


def _fake(mode: FakeTensorMode, value: Tensor, symbolic: Any) -> FakeTensor:
    source = symbolic.tensor_source
    fake: FakeTensor = mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)
    return fake

"""The backward of a custom function, as it was written: for derivatives of it.

Dynamo makes two graphs of an `autograd.Function`, and looks at its backward with grad mode off: what it wrote
down has no history, nor does it know whether the user allowed one (`once_differentiable`). So the backward
that was written is noted beside Dynamo's graph of it (`dynamo_functions`), with all that it finds on its
`ctx`; a backward under `create_graph=True` runs that, as eager does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

NOTE = "aheadgrad_backward"  # in the meta of the first placeholder of Dynamo's graph of a backward
_CANNOT = (
    "trying to differentiate twice a custom autograd.Function of which only Dynamo's graph is known, with "
    'first derivatives; aheadgrad.compile knows what was written, with frontend="trace" always'
)


@dataclass(frozen=True)
class Kept:
    """One of the values that Dynamo's graphs hand from forward to backward."""

    place: int


@dataclass(frozen=True, eq=False)
class WrittenBackward:
    """A backward as the user wrote it. `saved` and `attributes` are on its `ctx`, values in them by place.

    `tangents` are the places of its arguments among Dynamo's, `inputs` those of its results; None: not there.
    """

    fn: Callable[..., Any]
    saved: Sequence[Any]
    attributes: Mapping[str, Any]
    tangents: Sequence[int | None]
    inputs: Sequence[int | None]
    count: int

    @property
    def materializes(self) -> bool:
        return bool(self.attributes.get("materialize_grads", True))

    def run(self, grads: Sequence[Any], kept: Sequence[Any], needed: Sequence[bool]) -> tuple[Any, ...]:
        ctx = SimpleNamespace(**{name: _put(value, kept) for name, value in self.attributes.items()})
        ctx.saved_tensors = tuple(_put(value, kept) for value in self.saved)
        ctx.needs_input_grad = tuple(k is not None and needed[k] for k in self.inputs)
        found = self.fn(ctx, *(None if k is None else grads[k] for k in self.tangents))
        results: list[Any] = [None] * self.count
        for k, grad in zip(self.inputs, found if isinstance(found, tuple | list) else (found,), strict=False):
            if k is not None:
                results[k] = grad
        return tuple(results)


def not_again(grads: Sequence[Any], used: Sequence[Any]) -> tuple[Any, ...]:
    """Gradients whose derivatives, with respect to what was used for them, raise."""
    places = [k for k, g in enumerate(grads) if isinstance(g, torch.Tensor)]
    others = [t for t in used if isinstance(t, torch.Tensor) and t.requires_grad]
    refuse = torch._C._functions.DelayedError(_CANNOT.encode(), len(places) + len(others))
    marked = refuse(*(grads[k] for k in places), *others)
    found = dict(zip(places, marked if isinstance(marked, tuple | list) else (marked,), strict=False))
    return tuple(found.get(k, g) for k, g in enumerate(grads))


def _put(value: Any, kept: Sequence[Any]) -> Any:
    if isinstance(value, Kept):
        return kept[value.place]
    if isinstance(value, dict):
        return {key: _put(v, kept) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_put(v, kept) for v in value)
    return value


def written_backward(bwd: fx.GraphModule) -> WrittenBackward | None:
    """What was written, of which Dynamo made this graph; None where that is not known."""
    return next(iter(bwd.graph.nodes)).meta.get(NOTE)

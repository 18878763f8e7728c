"""FX node metadata that travels with an interpreted graph (stack traces, module paths)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx.traceback as fx_traceback

_KEEP = ("stack_trace", "nn_module_stack", "source_fn_stack", "recompute", "custom", "ac_graph_id")


def current_node_meta() -> dict[str, Any] | None:
    """The metadata of the FX node that is being interpreted right now, if any."""
    if not fx_traceback.has_preserved_node_meta():
        return None
    meta = fx_traceback.get_current_meta()
    return {k: meta[k] for k in _KEEP if k in meta} or None


@contextmanager
def preserved_node_meta() -> Iterator[None]:
    with fx_traceback.preserve_node_meta():
        yield

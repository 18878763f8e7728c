"""Interpreted graphs: node metadata that travels along (stack traces, module paths), modes that are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from aheadgrad.torchlayer.unbacked import sizes_from_values

_KEEP = ("stack_trace", "nn_module_stack", "source_fn_stack", "recompute", "custom", "ac_graph_id")


def current_node_meta() -> dict[str, Any] | None:
    """The metadata of the FX node that is being interpreted right now, if any."""
    if not fx_traceback.has_preserved_node_meta():
        return None
    meta = fx_traceback.get_current_meta()
    return {k: meta[k] for k in _KEEP if k in meta} or None


def module_paths(meta: Mapping[str, Any] | None) -> list[str]:
    """The paths of the modules that a node belongs to, from the outermost inwards."""
    stack = (meta or {}).get("nn_module_stack") or {}
    paths = [value[0] if isinstance(value, tuple) else str(value) for value in stack.values()]
    return [p.removeprefix("L['self'].").removeprefix("L['fn'].").replace("_modules.", "") for p in paths]


@contextmanager
def preserved_node_meta() -> Iterator[None]:
    with fx_traceback.preserve_node_meta():
        yield


class Interpreter(fx.Interpreter):
    """Where a line of the graph raises, the modes and transforms that earlier lines entered are left.

    Ops get plain lists and dictionaries, as from Python, not the unchangeable ones that graphs hold.
    """

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_plain, args)), {key: _plain(value) for key, value in kwargs.items()}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        depth = len(retrieve_all_functorch_interpreters())
        try:
            return super().run(*args, **kwargs)
        except Exception:
            while len(retrieve_all_functorch_interpreters()) > depth:
                torch._C._functorch.pop_dynamic_layer_stack()
            for node in reversed(list(self.env)):
                for user in node.users:
                    if getattr(user.target, "__name__", "").startswith("_exit_"):
                        user.target(self.env[node])  # type: ignore[operator]
            self.env.clear()
            raise


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_plain, value))
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return {key: _plain(v) for key, v in value.items()} if isinstance(value, dict) else value


def fill_in_values(module: fx.GraphModule) -> None:
    """What a pass has added or changed gets a fake tensor in `meta["val"]`, as all others have.

    Where values decide sizes, only what has none: all others would get new symbols."""
    nodes = list(module.graph.nodes)
    values = [v for n in nodes for v in pytree.tree_leaves(n.meta.get("val"))]
    decided = any(sizes_from_values(s) for v in values for s in (v.shape if isinstance(v, Tensor) else (v,)))
    if decided and all("val" in n.meta for n in nodes if n.op == "call_function"):
        return
    given = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
    mode = next((v.fake_mode for v in given if isinstance(v, FakeTensor)), None)
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*given)

"""Whom the parity tests talk to.

By default that is aheadgrad. `PARITY_PEER=torch` puts torch's own implementation in its place, and
`PARITY_PEER=eager` no compiler at all: the first shows that a test asks for nothing that torch's
users do not have today (except where it is marked `differs_from_peer`), the second that it asks for
nothing that eager does not do.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

PEER = os.environ.get("PARITY_PEER", "aheadgrad")
OURS = PEER == "aheadgrad"


def _untouched(fn: Any, *_args: Any, **_kwargs: Any) -> Any:
    return fn


def _eager_api() -> SimpleNamespace:
    return SimpleNamespace(
        aot_function=_untouched,
        aot_module=_untouched,
        aot_module_simplified=_untouched,
        compiled_function=_untouched,
        compiled_module=_untouched,
        memory_efficient_fusion=_untouched,
        make_boxed_func=_untouched,
        make_boxed_compiler=_untouched,
        nop=_untouched,
        default_partition=None,
        default_decompositions=None,
        get_aot_compilation_context=None,
        get_graph_being_compiled=None,
    )


def _load() -> Any:
    if PEER == "eager":
        return _eager_api()
    try:
        return importlib.import_module({"aheadgrad": "aheadgrad.compat", "torch": "functorch.compile"}[PEER])
    except KeyError:
        raise ValueError(f"PARITY_PEER is {PEER!r}: say aheadgrad, torch or eager") from None


api: Any = _load()


def compile_drop_in(fn: Any, **options: Any) -> Any:
    """`aot_function` or `aot_module` with trivial compilers, whoever it comes from."""
    entry = api.aot_module if isinstance(fn, torch.nn.Module) else api.aot_function
    return entry(fn, api.nop, **options)


def compile_plainly(fn: Any, *, keep_inference_input_mutations: bool = False, **options: Any) -> Any:
    """Our own entry point, which decides for itself where changes of inputs are made."""
    if OURS:
        return importlib.import_module("aheadgrad").compile(fn, fallback="error", **options)
    return compile_drop_in(fn, keep_inference_input_mutations=keep_inference_input_mutations, **options)


def compile_with_dynamo(fn: Callable[..., Any], **options: Any) -> Any:
    """`torch.compile` with the backend under test; `options` are the backend's own."""
    if PEER == "torch":
        return torch.compile(fn, fullgraph=True, backend="aot_eager")
    if PEER == "eager":
        return fn
    return torch.compile(fn, fullgraph=True, backend="aheadgrad", options={"backend": "eager", **options})


ENTRIES: dict[str, Callable[..., Any]] = {"drop_in": compile_drop_in, "compile": compile_plainly}

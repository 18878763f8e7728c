"""The backend for `torch.compile`, on the same walk; Dynamo's guards stand in for ours.

    torch.compile(model, backend="aheadgrad", options={"backend": "eager"})

Dynamo hands over a graph of torch calls and fake inputs (sizes that change are symbols, and come
as inputs of their own). The graph is run once by an interpreter, so that each recorded op knows
the user's line and module that it came from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx

from aheadgrad.backends.registry import find_backend
from aheadgrad.capture.origins import stacklevel_of_user
from aheadgrad.errors import AheadgradError, FallbackError, FallbackWarning, InvalidOption, reason_of
from aheadgrad.frontends.boxed import compile_flat
from aheadgrad.options import Options
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.fxmeta import preserved_node_meta

_NAMES = [f.name for f in fields(Options) if f.name not in ("frontend", "dynamic", "max_entries")]


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles one graph of Dynamo's. `options` are those of `aheadgrad.compile`."""
    return compile_graph(gm, example_inputs, _options(options or {}, mode))


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], chosen: Options) -> Callable[..., Any]:
    leaves, spec = pytree.tree_flatten(tuple(example_inputs))
    flat = all(child.is_leaf() for child in spec.children())
    interpreter = fx.Interpreter(gm)

    def invoke(*inputs: Any) -> Any:
        args = inputs if flat else pytree.tree_unflatten(list(inputs), spec)
        with preserved_node_meta():
            return interpreter.run(*args)

    try:
        entry = compile_flat(gm, leaves, chosen, invoke)
    except Exception as error:  # whatever we cannot do, the graph as it was given can be run
        if chosen.fallback == "error":
            if isinstance(error, AheadgradError):
                raise
            raise FallbackError(reason_of(error)) from error
        return _uncompiled(gm, error)
    if flat:
        return entry.call
    return torch.compiler.disable(lambda *args: entry.run(pytree.tree_leaves(args)))


def _uncompiled(gm: fx.GraphModule, error: Exception) -> Callable[..., Any]:
    reason = reason_of(error)
    text = f"aheadgrad runs this graph uncompiled: {reason}."
    warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())
    return torch.compiler.disable(gm.forward)


def _options(given: dict[str, Any], mode: str | None) -> Options:
    unknown = [name for name in given if name not in _NAMES]
    if unknown:
        raise InvalidOption(f"options={{{unknown[0]!r}: ...}} is not known; choose from {', '.join(_NAMES)}.")
    if mode is not None:
        raise InvalidOption(f"mode={mode!r} is one of Inductor's; this backend takes options={{...}}.")
    options = Options(**given)
    find_backend(options.backend)
    return options

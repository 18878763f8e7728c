"""The default front end: Dynamo understands the Python, our backend compiles the graphs it finds.

    fast = aheadgrad.compile(model)
    torch.compile(model, backend="aheadgrad", options={"backend": "eager"})

Dynamo's guards stand in for ours. It hands over a graph of torch calls and example inputs (sizes that change
are symbols, and come as inputs of their own), which is run once by an interpreter, so that each recorded op
knows the user's line. What cannot be compiled runs as it is, and `.fallbacks` says so: a graph that our
recording refuses, a frame that Dynamo fails on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.compiler import is_dynamo_compiling

from aheadgrad import errors
from aheadgrad.backends.registry import begin, find_backend
from aheadgrad.errors import MISTAKES, AheadgradError, FallbackError, reason_of
from aheadgrad.frontends import misses
from aheadgrad.frontends.compiled import CompiledFunction, is_transformed, runs_the_original
from aheadgrad.frontends.flat import compile_flat
from aheadgrad.options import Options
from aheadgrad.report.origins import first_origin, stacklevel_of_user
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import dispatch_restored
from aheadgrad.torchlayer.dynamo import ignore_hooks_of_saved_tensors
from aheadgrad.torchlayer.dynamo_ops import say_plainly
from aheadgrad.torchlayer.fake import value_is_read
from aheadgrad.torchlayer.fxmeta import Interpreter, preserved_node_meta

_Whose = Callable[[], "DynamoFunction | None"]  # which function a graph is of, as long as it is there


class DynamoFunction(CompiledFunction):
    """A function whose Python Dynamo understands."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        from aheadgrad.torchlayer.frames import compiled_by_dynamo  # loads Dynamo, which takes its time

        super().__init__(fn, options)
        how: dict[str, Any] = {"fullgraph": options.fullgraph, "dynamic": options.dynamic}
        how.update(limit=options.max_entries, strict=options.fallback == "error")
        graphs = partial(compile_graph, options=options, whose=weakref.ref(self))  # Dynamo keeps it for ever
        self._run, self._frames = compiled_by_dynamo(fn, graphs, self, **how)
        self._begun = False

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling() or runs_the_original():
            return self._fn(*args, **kwargs)
        if is_transformed():
            return self._transformed(args, kwargs)
        if not self._begun:
            self._begun = True
            begin(self.options)
        try:
            out = self._run(*args, **kwargs)
        except BaseException:
            self._frames.call_is_over(well=False)
            raise
        if self._frames.failed:
            self._frames.call_is_over(well=True)
        return out

    def broke(self, where: str, reason: str) -> None:
        if f"{where}: {reason}" not in self.breaks:
            self.breaks.append(f"{where}: {reason}")

    def missed(self, function: str, reasons: list[str]) -> None:
        self.note_miss(misses.from_dynamo(function, reasons))


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: Any = None
) -> Callable[..., Any]:
    """The backend of `torch.compile`: compiles one graph. `options` are those of `aheadgrad.compile`."""
    told = {} if mode in (None, "default") else {"mode": mode}
    chosen = Options.for_graphs({**told, **(options or {})})
    find_backend(chosen.backend, chosen.mode)
    return compile_graph(gm, example_inputs, chosen, lambda: None)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, whose: _Whose
) -> Callable[..., Any]:
    """One graph of Dynamo's compiled, or itself where that cannot be."""
    say_plainly(gm)
    leaves, spec = pytree.tree_flatten(tuple(example_inputs))
    flat = all(child.is_leaf() for child in spec.children())
    told = whose()

    def invoke(*inputs: Any) -> Any:
        args = inputs if flat else pytree.tree_unflatten(list(inputs), spec)
        with preserved_node_meta(), dispatch_restored():
            return Interpreter(gm).run(*args)  # (it keeps values)

    try:
        entry = compile_flat(gm, leaves, options, invoke)
    except Exception as error:  # whatever we cannot do, the graph as it was given can be run
        if told is not None and isinstance(error, errors.DataDependentError) and not options.fullgraph:
            raise value_is_read() from error  # Dynamo breaks the graph there
        ours = isinstance(error, AheadgradError)
        if isinstance(error, MISTAKES) or (told is not None and not ours):
            raise  # perhaps a line of the user's is wrong: the frame runs in eager, which shows it
        if options.fallback == "error":
            raise error if ours else FallbackError(reason_of(error)) from error
        return _uncompiled(gm, reason_of(error), whose)
    if told is not None:
        entry.name = _place(gm) or told.name
        told.entries.append(entry)
        if entry.not_kept:
            told.note_miss(misses.NotKept.because(entry.name, entry.not_kept))
    ignore_hooks_of_saved_tensors()
    if flat:
        return entry.call
    return torch.compiler.disable(lambda *args: entry.call(*pytree.tree_leaves(args)))


def _uncompiled(gm: fx.GraphModule, reason: str, whose: _Whose) -> Callable[..., Any]:
    """The graph itself; each run of it is counted, where somebody counts."""
    place = _place(gm)
    why = f"{reason} ({place})" if place else reason
    if whose() is None:
        text = f"aheadgrad runs this graph uncompiled: {why}."
        warnings.warn(text, errors.FallbackWarning, stacklevel=stacklevel_of_user())

    def run(*args: Any) -> Any:
        told = whose()
        if told is not None:
            told.note_uncompiled(why)
        with dispatch_restored():
            return gm.forward(*args)

    return torch.compiler.disable(run)


def _place(gm: fx.GraphModule) -> str:
    """Where the first op of a graph is."""
    origin = first_origin(node for node in gm.graph.nodes if node.op.startswith("call"))
    return "" if origin is None else origin.place

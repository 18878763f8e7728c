"""The default front end: Dynamo understands the Python, our backend compiles the graphs it finds.

    fast = aheadgrad.compile(model)
    torch.compile(model, backend="aheadgrad", options={"backend": "eager"})

Both take the same walk; Dynamo's guards stand in for ours. Dynamo hands over a graph of torch calls and fake
inputs (sizes that change are symbols, and come as inputs of their own). The graph is run once by an
interpreter, so that each recorded op knows the user's line and module that it came from.

What cannot be compiled runs as it is, and `.fallbacks` says so: a graph that our recording refuses, a frame
that Dynamo fails on. Such a frame runs in eager, so an error in a line of the user's is raised there as
always; only if eager has nothing against it is the frame counted, and left alone from then on.
"""

from __future__ import annotations

import logging
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.compiler import is_dynamo_compiling

from aheadgrad import errors
from aheadgrad.backends.registry import find_backend
from aheadgrad.errors import MISTAKES, AheadgradError, FallbackError, reason_of
from aheadgrad.frontends import misses
from aheadgrad.frontends.compiled import FULL, CompiledFunction, Described, runs_the_original
from aheadgrad.frontends.flat import compile_flat
from aheadgrad.options import Options
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import dispatch_restored
from aheadgrad.torchlayer.dynamo import ignore_hooks_of_saved_tensors
from aheadgrad.torchlayer.dynamo_ops import say_plainly
from aheadgrad.torchlayer.fake import value_is_read
from aheadgrad.torchlayer.fxmeta import Interpreter, preserved_node_meta

_LINE = re.compile(r'File "(.*)", line (\d+), in (.*)')
_Whose = Callable[[], "DynamoFunction | None"]  # which function a graph is of, as long as it is there
_LOG = logging.getLogger("aheadgrad.dynamo")


class DynamoFunction(CompiledFunction):
    """A function whose Python Dynamo understands."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        from aheadgrad.torchlayer.frames import compiled_by_dynamo  # loads Dynamo, which takes its time

        super().__init__(fn, options)
        self._hopeless: dict[CodeType, str] = {}  # why
        self._failed: dict[int, dict[CodeType, str]] = {}  # why, in calls that are under way, by thread
        how: dict[str, Any] = {"fullgraph": options.fullgraph, "dynamic": options.dynamic}
        graphs = partial(compile_graph, options=options, whose=weakref.ref(self))  # Dynamo keeps it for ever
        self._run = compiled_by_dynamo(fn, graphs, self, limit=options.max_entries, **how)

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling() or runs_the_original():
            return self._fn(*args, **kwargs)
        try:
            out = self._run(*args, **kwargs)
        except BaseException:
            self._take_failed()
            raise
        if self._failed:
            self._tell_failed()
        return out

    def failed(self, code: CodeType, error: Exception, *, perhaps_users: bool) -> None:
        """Dynamo could not compile a frame, which now runs as it is: eager shows whether a line is wrong."""
        _LOG.info("%s is not compiled", code.co_name, exc_info=error)
        way_out = "" if perhaps_users else '; frontend="trace" may be able to compile it'
        what = reason_of(getattr(error, "inner_exception", error))
        why = f"Dynamo fails on {code.co_name} ({what}){way_out}"
        if self.options.fallback == "error" and not perhaps_users:
            raise FallbackError(why) from error
        where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"
        self._failed.setdefault(get_ident(), {})[code] = f"{why} ({where})"

    def is_left_alone(self, code: CodeType) -> bool:
        """Is this a frame that Dynamo failed on before?"""
        if code in self._hopeless:
            self.note_uncompiled(self._hopeless[code])
        return code in self._hopeless

    def _take_failed(self) -> dict[CodeType, str]:
        """What failed in this thread's call, which is over."""
        return self._failed.pop(get_ident(), {})

    def _tell_failed(self) -> None:
        """After the call: eager had nothing against what Dynamo failed on."""
        for code, why in self._take_failed().items():
            self._hopeless[code] = why
            self.note_uncompiled(why)

    def broke(self, where: str, reason: str) -> None:
        if f"{where}: {reason}" not in self.breaks:
            self.breaks.append(f"{where}: {reason}")

    def missed(self, function: str, reasons: list[str]) -> None:
        self.misses.append(misses.from_dynamo(function, reasons))
        misses.tell(self.misses[-1])

    def full(self) -> None:
        self.note_uncompiled(FULL)


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: Any = None
) -> Callable[..., Any]:
    """The backend of `torch.compile`: compiles one graph. `options` are those of `aheadgrad.compile`."""
    if mode is not None:
        raise errors.InvalidOption(f"mode={mode!r} is one of Inductor's; this backend takes options={{...}}.")
    chosen = Options.for_graphs(options or {})
    find_backend(chosen.backend)
    return compile_graph(gm, example_inputs, chosen, lambda: None)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, whose: _Whose
) -> Callable[..., Any]:
    """One graph of Dynamo's compiled, or itself where that cannot be."""
    say_plainly(gm)
    leaves, spec = pytree.tree_flatten(tuple(example_inputs))
    flat = all(child.is_leaf() for child in spec.children())
    interpreter, told = Interpreter(gm), whose()

    def invoke(*inputs: Any) -> Any:
        args = inputs if flat else pytree.tree_unflatten(list(inputs), spec)
        with preserved_node_meta(), dispatch_restored():
            return interpreter.run(*args)

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
        source = entry.source + "\n\n" + entry.entry.source
        told.entries.append(Described(_place(gm) or told.name, entry.entry, source))
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
    """Where a graph begins: the innermost line of the user's behind its first op."""
    ops = (node for node in gm.graph.nodes if node.op.startswith("call"))
    found = next(filter(None, (_LINE.findall(node.meta.get("stack_trace") or "") for node in ops)), None)
    return "" if found is None else "{}:{}, in {}".format(*found[-1])

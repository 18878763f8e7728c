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
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.compiler import is_dynamo_compiling

from aheadgrad.backends.registry import find_backend
from aheadgrad.errors import (
    AheadgradError,
    DataDependentError,
    FallbackError,
    FallbackWarning,
    InvalidOption,
    InvalidProgram,
    RecompileWarning,
    reason_of,
)
from aheadgrad.frontends import misses
from aheadgrad.frontends.boxed import compile_flat
from aheadgrad.frontends.compiled import CompiledFunction, Described, runs_the_original
from aheadgrad.options import Options
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.runtime.entry import Entry
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.fake import value_is_read
from aheadgrad.torchlayer.fxmeta import Interpreter, preserved_node_meta

_NAMES = [
    f.name for f in fields(Options) if f.name not in ("frontend", "fullgraph", "dynamic", "max_entries")
]
_LOG = logging.getLogger("aheadgrad.dynamo")


@dataclass(eq=False, repr=False)
class GraphEntry(Described):
    """One graph of Dynamo's, compiled."""

    name: str
    entry: Entry
    source: str


@dataclass(frozen=True)
class Break:
    """A place where Dynamo split the function."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class DynamoFunction(CompiledFunction):
    """A function whose Python Dynamo understands."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        from aheadgrad.torchlayer.frames import compiled_by_dynamo  # loads Dynamo, which takes its time

        super().__init__(fn, options)
        self._hopeless: dict[CodeType, str] = {}  # why
        self._failed: list[tuple[int, CodeType, Exception]] = []  # in calls that are under way, by thread
        self._run = compiled_by_dynamo(
            fn,
            _backend(self, options),
            self,
            fullgraph=options.fullgraph,
            dynamic=options.dynamic,
            limit=options.max_entries,
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
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

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self(*args, **kwargs)

    def failed(self, code: CodeType, error: Exception) -> None:
        """Dynamo could not compile a frame, which now runs as it is: eager shows whether a line is wrong."""
        _LOG.info("%s is not compiled", code.co_name, exc_info=error)
        if self.options.fallback == "error" and not _may_be_users(error):
            raise FallbackError(_why(code, error)) from error
        self._failed.append((get_ident(), code, error))

    def is_left_alone(self, code: CodeType) -> bool:
        """Is this a frame that Dynamo failed on before?"""
        if code not in self._hopeless:
            return False
        self.note_uncompiled(self._hopeless[code])
        return True

    def _take_failed(self) -> list[tuple[CodeType, Exception]]:
        """What failed in this thread's call, which is over."""
        mine = [found for found in self._failed if found[0] == get_ident()]
        self._failed = [found for found in self._failed if found[0] != get_ident()]
        return [(code, error) for _, code, error in mine]

    def _tell_failed(self) -> None:
        """After the call: eager had nothing against what Dynamo failed on."""

        for code, error in self._take_failed():
            self._hopeless[code] = _why(code, error)
            where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"
            self.note_uncompiled(self._hopeless[code], where)

    def broke(self, where: str, reason: str) -> None:
        found = Break(where, reason)
        if found not in self.breaks:
            self.breaks.append(found)

    def missed(self, function: str, reasons: list[str]) -> None:
        self.misses.append(misses.from_dynamo(function, reasons))
        misses.tell(self.misses[-1])

    def full(self) -> None:
        reason = "the limit of entries is reached"
        if self.options.fallback == "error":
            raise FallbackError(reason)
        if self.fallbacks.count(reason):
            changing = misses.what_keeps_changing(self.misses)
            text = (
                f"{self.name} was compiled {self.options.max_entries} times for different calls; further "
                f"ones run uncompiled. What keeps changing: {changing}. Raise max_entries "
                f"(now {self.options.max_entries}), or keep shapes and Python arguments the same."
            )
            warnings.warn(text, RecompileWarning, stacklevel=stacklevel_of_user())


def _why(code: CodeType, error: Exception) -> str:
    """Why a frame that Dynamo failed on runs uncompiled."""
    way_out = "" if _may_be_users(error) else '; frontend="trace" may be able to compile it'
    what = reason_of(getattr(error, "inner_exception", error))
    return f"Dynamo fails on {code.co_name} ({what}){way_out}"


def _may_be_users(error: Exception) -> bool:
    from aheadgrad.torchlayer.frames import is_users_error

    return is_users_error(error)


def _backend(whose: DynamoFunction, options: Options) -> Callable[..., Any]:
    """Compiles the graphs of one function; Dynamo keeps backends for ever, so not the function itself."""
    known = weakref.ref(whose)

    def aheadgrad(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, options, known())

    return aheadgrad


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend of `torch.compile`: compiles one graph. `options` are those of `aheadgrad.compile`."""
    return compile_graph(gm, example_inputs, _options(options or {}, mode), None)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, whose: DynamoFunction | None
) -> Callable[..., Any]:
    """One graph of Dynamo's compiled, or itself where that cannot be."""
    leaves, spec = pytree.tree_flatten(tuple(example_inputs))
    flat = all(child.is_leaf() for child in spec.children())
    interpreter = Interpreter(gm)

    def invoke(*inputs: Any) -> Any:
        args = inputs if flat else pytree.tree_unflatten(list(inputs), spec)
        with preserved_node_meta():
            return interpreter.run(*args)

    try:
        entry = compile_flat(gm, leaves, options, invoke)
    except Exception as error:  # whatever we cannot do, the graph as it was given can be run
        if whose is not None and isinstance(error, DataDependentError) and not options.fullgraph:
            raise value_is_read() from error  # Dynamo breaks the graph there
        theirs = isinstance(error, InvalidProgram | InvalidOption)  # a partition function's mistake
        if theirs or (whose is not None and not isinstance(error, AheadgradError)):
            raise  # perhaps a line of the user's is wrong: the frame runs in eager, which shows it
        if options.fallback == "error":
            raise error if isinstance(error, AheadgradError) else FallbackError(reason_of(error)) from error
        return _uncompiled(gm, reason_of(error), whose)
    if whose is not None:
        source = entry.source + "\n\n" + entry.entry.source
        whose.entries.append(GraphEntry(_place(gm) or whose.name, entry.entry, source))
    if flat:
        return entry.call
    return torch.compiler.disable(lambda *args: entry.run(pytree.tree_leaves(args)))


def _uncompiled(gm: fx.GraphModule, reason: str, whose: DynamoFunction | None) -> Callable[..., Any]:
    """The graph itself; each run of it is counted, where somebody counts."""
    where = _place(gm)
    if whose is None:
        text = f"aheadgrad runs this graph uncompiled: {reason}{f' ({where})' if where else ''}."
        warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())
        return torch.compiler.disable(gm.forward)
    known = weakref.ref(whose)

    def run(*args: Any) -> Any:
        told = known()
        if told is not None:
            told.note_uncompiled(reason, where)
        return gm.forward(*args)

    return torch.compiler.disable(run)


def _place(gm: fx.GraphModule) -> str:
    """Where a graph begins: the innermost line of the user's behind its first op."""
    for node in gm.graph.nodes:
        trace = node.meta.get("stack_trace") if node.op.startswith("call") else None
        if trace:
            lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
            file, line, function = (lines[-1].split(", ") + ["", ""])[:3]
            return f"{file[6:-1]}:{line.removeprefix('line ')}, {function}".rstrip(", ")
    return ""


def _options(given: dict[str, Any], mode: str | None) -> Options:
    unknown = [name for name in given if name not in _NAMES]
    if unknown:
        raise InvalidOption(f"options={{{unknown[0]!r}: ...}} is not known; choose from {', '.join(_NAMES)}.")
    if mode is not None:
        raise InvalidOption(f"mode={mode!r} is one of Inductor's; this backend takes options={{...}}.")
    options = Options(**given)
    find_backend(options.backend)
    return options

"""The public functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from aheadgrad import pipeline
from aheadgrad.backends.registry import find_backend
from aheadgrad.errors import InvalidOption
from aheadgrad.export.exported import Exported
from aheadgrad.export.making import export
from aheadgrad.frontends.compiled import CompiledFunction
from aheadgrad.frontends.compiled_module import CompiledModule
from aheadgrad.frontends.dynamo import DynamoFunction
from aheadgrad.frontends.function import flatten, parameter_names
from aheadgrad.frontends.state import call_holding, held_by
from aheadgrad.frontends.trace import TracedFunction
from aheadgrad.options import Options, Policy
from aheadgrad.report.journal import Journal
from aheadgrad.report.text import Captured
from aheadgrad.torchlayer.transforms import without_functionalize

__all__ = ["capture", "compile", "export", "load"]


def compile(
    fn: Callable[..., Any] | nn.Module | None = None,
    *,
    frontend: Any = "dynamo",
    fullgraph: bool = False,
    backend: Any = "default",
    mode: str | None = None,
    partition: Any = "default",
    memory: Any = "usual",
    memory_budget: float | None = None,
    policies: Sequence[Policy] = (),
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    dynamic: bool | None = None,
    fallback: Any = "warn",
    backward_autocast: Any = "eager",
    any_order: bool = True,
    max_entries: int = 8,
    cache: Any = False,
) -> Any:
    """Compiles a function or module ahead of time, forward and backward together.

    The result is called like the original and behaves like it; each new kind of call is compiled when it
    first comes.

        fast = aheadgrad.compile(model)
        loss = fast(batch).sum()
        loss.backward()

    By default Inductor fuses ops and rounds as `torch.compile` does, where there is a C++ compiler or Triton;
    `mode` is one of its modes: "reduce-overhead" uses CUDA graphs, "max-autotune" tries out many kernels.
    `backend="eager"` runs the same ops as eager, with the same results to the last bit (docs/backends.md).

    `memory="less"` and `memory_budget` save less for the backward, and compute more again (docs/memory.md).
    Derivatives of any order work; `any_order=False` gives up all but the first.

    `dynamic` tells which sizes of the arguments become symbols: all (True), none but marked ones (False), or
    those that change from one entry to the next (None). `max_entries` limits how many kinds of calls are
    compiled. `fallback="error"` raises instead of running a call uncompiled. `cache=True`, or the path of a
    directory, keeps compiled entries for other processes (docs/cache.md).
    """
    options = Options(
        frontend=frontend,
        fullgraph=fullgraph,
        backend=backend,
        mode=mode,
        partition=partition,
        memory=memory,
        memory_budget=memory_budget,
        policies=tuple(policies),
        decompositions=decompositions,
        dynamic=dynamic,
        fallback=fallback,
        backward_autocast=backward_autocast,
        any_order=any_order,
        max_entries=max_entries,
        cache=cache,
    )
    find_backend(backend, mode)
    return _compile(fn, options) if fn is not None else lambda f: _compile(f, options)


def _compile(fn: Any, options: Options) -> Any:
    if isinstance(fn, CompiledFunction | CompiledModule):
        return fn
    if not callable(fn):
        raise InvalidOption(f"aheadgrad.compile needs a function or a module, not {type(fn).__name__}.")
    kind = DynamoFunction if options.frontend == "dynamo" else TracedFunction
    compiled = kind(without_functionalize(fn), options)
    return CompiledModule(fn, compiled) if isinstance(fn, nn.Module) else compiled


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """The joint program of one call: printable, with `.graph`, `.signature`, `.facts`, `.explain()`."""
    call = call_holding(fn, flatten(args, kwargs, parameter_names(fn)), held_by(fn))
    journal = Journal()
    recording, joint = pipeline.record(call, Options(), journal)
    recording.release()
    return Captured(joint, journal)


def load(path: str | os.PathLike[str], *, trust: Collection[str] = (), here: bool = True) -> Exported:
    """An export from a file that `exported.save(path)` wrote. Nothing in it is executed; a file that is
    damaged, altered or of a newer version raises `errors.ArtifactError`.

    `trust` names namespaces of custom ops that it may use. Without `here` tensors stay on the CPU.
    """
    return Exported.load(path, trust=trust, here=here)

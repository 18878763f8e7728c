"""Dynamo's way of compiling a function, frame by frame, with someone told what becomes of each.

Dynamo calls a callback for every Python frame that it is about to run. Ours stands around Dynamo's own: an
error of Dynamo's, or one that Dynamo wraps, leaves that frame as it is for this run, so that eager shows
whether the line itself is wrong. Where Dynamo breaks a graph, skips a frame or compiles again, the teller
hears why.
"""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import RLock, get_ident
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo import eval_frame, exc
from torch._dynamo.mutation_guard import GenerationTracker
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import graph_break_reasons
from torch._guards import TracingContext
from torch.fx._symbolic_trace import is_fx_symbolic_tracing as fx_traces

from aheadgrad.errors import FallbackError, reason_of, without_frames
from aheadgrad.torchlayer.collection import garbage_of_its_own
from aheadgrad.torchlayer.dispatch import dispatch_restored
from aheadgrad.torchlayer.dynamo_besides import nothing_besides
from aheadgrad.torchlayer.dynamo_functions import backwards_are_noted
from aheadgrad.torchlayer.evalframe import hide_from_dynamo, is_hidden
from aheadgrad.torchlayer.fake import quiet_logs
from aheadgrad.torchlayer.letting_go import let_go_of_locals

_AS_IT_IS = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False
)
_ENTRIES_ONLY = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.RUN_ONLY), apply_to_code=False
)
_REFUSALS = (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError)  # what fullgraph=True asks for
_NOT_SHOWN = ("Hint:", "Developer debug context", "For more details", "User stack trace", "from user code")
_NOT_OURS_TO_CATCH = (exc.ResumePrologueTracingError, exc.RecompileError)
_REGION = "set_eval_frame_isolate_recompiles_id"  # from torch 2.13
_frames = torch._C._dynamo.eval_frame
_LOG = logging.getLogger("torch._dynamo.convert_frame")
_OURS = logging.getLogger("aheadgrad.dynamo")
ONE_AT_A_TIME = RLock()  # as Dynamo compiles; what is patched is put back in order
_PATIENCE = 8  # how often a frame may raise before Dynamo is no longer asked about it


class Teller(Protocol):
    """Who is told. `missed` hears what each entry of a frame has against a call, the latest entry first.

    `note_uncompiled` without a reason: there are as many entries as there may be.
    """

    def broke(self, where: str, reason: str) -> None: ...
    def missed(self, function: str, reasons: list[str]) -> None: ...
    def note_uncompiled(self, reason: str = ...) -> None: ...


class _Noting:
    """Dynamo's conversion of one frame; what it raises is noted, although Dynamo may go on from there."""

    def __init__(self, convert: Any) -> None:
        self._convert = convert
        self.raised: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.raised = None
        try:
            return self._convert(*args, **kwargs)
        except Exception as error:
            self.raised = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)


class _Frames:
    def __init__(self, callback: Any, teller: Teller, *, fullgraph: bool, strict: bool) -> None:
        self._torchdynamo_orig_backend = callback  # Dynamo finds the backend by following this name
        self._teller = weakref.ref(teller)
        self._fullgraph, self._strict = fullgraph, strict
        self._noted: _Noting | None = None
        self._raised: Counter[CodeType] = Counter()
        self._full: set[CodeType] = set()
        self._hopeless: dict[CodeType, str] = {}  # frames that Dynamo failed on, and why
        self.failed: dict[int, dict[CodeType, str]] = {}  # the same in calls that are under way, by thread
        self.limit: dict[str, Any] = {}  # of entries, where Dynamo counts them for all who compile a function
        self.misses: list[Any] = []  # of the frame that is being compiled: one at a time, Dynamo has a lock
        convert: Any = getattr(callback, "_torchdynamo_orig_backend", None)
        if hasattr(convert, "_inner_convert"):
            self._noted = convert._inner_convert = _Noting(convert._inner_convert)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        code, teller = frame.f_code, self._teller()
        if teller is None:
            return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        if code in self._full:
            teller.note_uncompiled()
            return _ENTRIES_ONLY
        if code in self._hopeless:
            teller.note_uncompiled(self._hopeless[code])
            return _AS_IT_IS
        known = len(graph_break_reasons)
        try:
            with (
                ONE_AT_A_TIME,
                configured(self.limit),
                garbage_of_its_own(),
                backwards_are_noted(),
                dispatch_restored(),
                quiet_logs(),
                _quiet_about_limits(),
                nothing_besides(),
            ):
                result = self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
                call_directly(result.guarded_code, frame.f_globals)
        except Exception as error:
            self._swallowed()
            let_go_of_locals(error)
            return self._failed(code, error)
        finally:
            self._tell_misses(teller)
        if "dispatch mode" in (getattr(result, "skip_reason", None) or ""):
            teller.note_uncompiled("Dynamo compiles nothing under a TorchDispatchMode")
            return _AS_IT_IS  # with all that it calls: counted once
        for reason in graph_break_reasons[known:]:
            teller.broke(_place(reason.user_stack), _short(reason.reason))
        raised = self._swallowed()
        if raised is None:
            return result
        let_go_of_locals(raised)
        return self._skipped(teller, code, without_frames(raised), result)  # this frame is one of them

    def _swallowed(self) -> Exception | None:
        """What Dynamo raised and caught again, told once."""
        if self._noted is None:
            return None
        found, self._noted.raised = self._noted.raised, None
        return found

    def _skipped(self, teller: Teller, code: CodeType, error: Exception, result: Any) -> Any:
        """Dynamo gave up, and would leave the frame alone for ever."""
        if is_users_error(error):
            self._raised[code] += 1
            if self._raised[code] <= _PATIENCE:
                return _AS_IT_IS
        strategy = getattr(error, "frame_exec_strategy", None)
        if strategy is not None and strategy.cur_action == FrameAction.RUN_ONLY:
            self._full.add(code)
            teller.note_uncompiled()
            return _ENTRIES_ONLY
        where = _place(getattr(error, "real_stack", None)) or f"{code.co_filename}:{code.co_firstlineno}"
        teller.broke(where, f"all of {code.co_name} is left to eager: {_short(str(error))}")
        return result

    def _tell_misses(self, teller: Teller) -> None:
        found = self.misses.copy()
        self.misses.clear()
        if found:
            teller.missed(found[0].orig_code.co_name, [_short(failure.reason) for failure in found])

    def _failed(self, code: CodeType, error: Exception) -> Any:
        """The frame runs as it is; or the error is raised, by a frame that does not hold it any more."""
        inner = getattr(error, "inner_exception", error)
        perhaps_users = is_users_error(error)
        try:
            refused = self._fullgraph and isinstance(error, _REFUSALS) and not perhaps_users
            if refused or isinstance(error, _NOT_OURS_TO_CATCH):
                raise error
            if type(inner).__module__.partition(".")[0] == "aheadgrad":
                raise inner from inner.__cause__
            return self._left_to_eager(code, error, inner, perhaps_users=perhaps_users)
        finally:
            del error, inner

    def _left_to_eager(
        self, code: CodeType, error: Exception, inner: Exception, *, perhaps_users: bool
    ) -> Any:
        _OURS.info("%s is not compiled", code.co_name, exc_info=error)
        way_out = "" if perhaps_users else '; frontend="trace" may be able to compile it'
        why = f"Dynamo fails on {code.co_name} ({reason_of(inner)}){way_out}"
        if self._strict and not perhaps_users:
            raise FallbackError(why) from error
        where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"
        self.failed.setdefault(get_ident(), {})[code] = f"{why} ({where})"
        return _AS_IT_IS

    def call_is_over(self, *, well: bool) -> None:
        """Eager has run what Dynamo failed on in this thread's call: was there nothing wrong with it?"""
        teller = self._teller()
        for code, why in self.failed.pop(get_ident(), {}).items():
            if well and teller is not None:
                self._hopeless[code] = why
                teller.note_uncompiled(why)


def configured(limit: dict[str, Any]) -> AbstractContextManager[None]:
    """A hook that is added to a part of a module later is seen; Dynamo would leave that out.

    Nor does each call tell the profiler how long Dynamo's own part of it takes, which takes longer than that.
    Garbage is looked for when all is done, if Python looks for it at all (`garbage_of_its_own`).
    """
    settings = {"skip_nnmodule_hook_guards": False, "record_runtime_overhead": False, **limit}
    if gc.isenabled():
        settings["run_gc_after_compile"] = False
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(settings)
    return patched


def call_directly(made: Any, scope: dict[str, Any]) -> None:
    """Dynamo wraps graphs, so that it does not look into them; not needed where it does not look anyway."""
    for name in made.code.co_names if made is not None else ():
        graph = getattr(scope.get(name), "_torchdynamo_orig_callable", None)
        if name.startswith("__compiled_fn") and is_hidden(graph):
            scope[name] = graph


@contextmanager
def _quiet_about_limits() -> Iterator[None]:
    """Dynamo logs that a limit of entries is reached; the teller says so in its own words."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("torch._dynamo hit config.")

    _LOG.addFilter(is_other)
    try:
        with quiet_logs():
            yield
    finally:
        _LOG.removeFilter(is_other)


def compiled_by_dynamo(
    fn: Any,
    backend: Callable[..., Any],
    teller: Teller,
    *,
    fullgraph: bool,
    dynamic: bool | None,
    limit: int,
    strict: bool,
) -> tuple[Callable[..., Any], Any]:
    """What calls `fn` through Dynamo (at most `limit` times compiled where Dynamo can count), and its frames.

    `strict`: a frame that Dynamo fails on is an error.
    """
    misses: list[Any] = []
    options: dict[str, Any] = {"nopython": fullgraph, "dynamic": dynamic, "guard_fail_fn": misses.append}
    isolated = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    if isolated:
        options.update(recompile_limit=limit, isolate_recompiles=True)
    context: Any = torch._dynamo.optimize(backend, **options)
    frames = _Frames(getattr(context, "callback", None), teller, fullgraph=fullgraph, strict=strict)
    frames.misses, frames.limit = misses, {} if isolated else {"recompile_limit": limit}
    if hasattr(context, "callback"):  # not where Dynamo is switched off
        context.callback = frames
    made = context(fn)
    made = made.forward if isinstance(made, nn.Module) and made is not fn else made
    return (None if fullgraph else quickly(made, context)) or made, frames


def quickly(made: Any, context: Any) -> Callable[..., Any] | None:
    """What calls a function through Dynamo as `made` does, without its provisions for what is rarely there.

    Those take longer than Dynamo's guards. A graph that we run as it is restores dispatch keys by itself.
    """
    is_usual = isinstance(made, FunctionType) and hasattr(_frames, _REGION)
    hooks = getattr(context, "enter_exit_hooks", ())  # the one hook counts calls
    if not is_usual or len(hooks) != 1 or context.error_on_graph_break is not None:
        return None
    set_frames, set_region = _frames.set_eval_frame, getattr(_frames, _REGION)
    fn, frames, region = made._torchdynamo_orig_callable, context.callback, context._isolate_recompiles_id
    usual = eval_frame._stance if eval_frame._stance == eval_frame.DynamoStance() else None
    jit_traces = torch._C._is_tracing

    def run(*args: Any, **kwargs: Any) -> Any:
        if eval_frame._stance is not usual or jit_traces() or fx_traces() or TracingContext.try_get():
            return made(*args, **kwargs)
        GenerationTracker.generation += 1
        region_before, before = set_region(region), set_frames(None)
        try:
            set_frames(frames)
            return fn(*args, **kwargs)
        finally:
            set_frames(before)
            set_region(region_before)

    hide_from_dynamo(run)
    return run


def is_users_error(error: Exception | None) -> bool:
    """May eager raise here, too? An op has failed in Dynamo's hands, or a line raises that nobody catches."""
    seen = (error, None if error is None else error.__cause__)
    kinds = (
        exc.TorchRuntimeError | exc.ObservedException | exc.BackendCompilerFailed
    )  # ours raise as they are
    return any(isinstance(e, kinds) for e in seen)


def _place(stack: Any) -> str:
    """`model.py:12, in forward`: the innermost line of the user's."""
    if not stack:
        return ""
    last = stack[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}"


def _short(text: str) -> str:
    """The first lines of one of Dynamo's long texts, as one."""
    lines = [line.strip() for line in str(text).splitlines()]
    kept = []
    for line in lines:
        if line.startswith(_NOT_SHOWN):
            break
        if line and line != "Graph Break Reason:":
            kept.append(line.removeprefix("Explanation: "))
    return " ".join(kept)[:300]

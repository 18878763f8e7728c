"""Dynamo's way of compiling a function, frame by frame, with someone told what becomes of each.

Dynamo calls a callback for every Python frame that it is about to run. Ours stands around Dynamo's own: an
error of Dynamo's, or one that Dynamo wraps, leaves that frame as it is for this run, so that eager shows
whether the line itself is wrong. Where Dynamo breaks a graph, skips a frame or compiles again, the teller
hears why.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo import exc
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import graph_break_reasons

from aheadgrad.torchlayer.fake import quiet_logs

_AS_IT_IS = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
_REFUSALS = (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError)  # what fullgraph=True asks for
_NOT_SHOWN = ("Hint:", "Developer debug context", "For more details", "User stack trace", "from user code")
_NOT_OURS_TO_CATCH = (exc.ResumePrologueTracingError, exc.RecompileError)


class Teller(Protocol):
    """Who is told; `failed` answers whether the frame is to be left alone from now on."""

    def broke(self, where: str, reason: str) -> None: ...
    def full(self, reason: str) -> None: ...
    def missed(self, function: str, reason: str) -> None: ...
    def failed(self, code: CodeType, error: Exception) -> bool: ...


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
    def __init__(self, callback: Any, teller: Teller, *, fullgraph: bool) -> None:
        self._torchdynamo_orig_backend = callback  # Dynamo finds the backend by following this name
        self._teller = weakref.ref(teller)
        self._fullgraph = fullgraph
        self._noted: _Noting | None = None
        convert = callback._torchdynamo_orig_backend
        if hasattr(convert, "_inner_convert"):
            self._noted = convert._inner_convert = _Noting(convert._inner_convert)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        known = len(graph_break_reasons)
        if self._noted is not None:
            self._noted.raised = None
        try:
            with quiet_logs():
                result = self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:
            return self._failed(frame.f_code, error)
        teller = self._teller()
        if teller is not None:
            for reason in graph_break_reasons[known:]:
                teller.broke(_place(reason.user_stack), _short(reason.reason))
            self._tell_skipped(teller, frame.f_code)
        return result

    def _tell_skipped(self, teller: Teller, code: CodeType) -> None:
        error = None if self._noted is None else self._noted.raised
        if error is None:
            return
        strategy = getattr(error, "frame_exec_strategy", None)
        if strategy is not None and strategy.cur_action == FrameAction.RUN_ONLY:
            teller.full(_short(str(error)))
        else:
            where = _place(getattr(error, "real_stack", None)) or f"{code.co_filename}:{code.co_firstlineno}"
            teller.broke(where, f"all of {code.co_name} is left to eager: {_short(str(error))}")

    def _failed(self, code: CodeType, error: Exception) -> Any:
        refused = self._fullgraph and isinstance(error, _REFUSALS)
        teller = self._teller()
        if refused or teller is None or isinstance(error, _NOT_OURS_TO_CATCH):
            raise error
        inner = getattr(error, "inner_exception", error)
        if type(inner).__module__.partition(".")[0] == "aheadgrad":
            raise inner from None
        for_good = teller.failed(code, error)
        return ConvertFrameReturn(frame_exec_strategy=_AS_IT_IS, apply_to_code=for_good)


def compiled_by_dynamo(
    fn: Any, backend: Callable[..., Any], teller: Teller, *, fullgraph: bool, dynamic: bool | None, limit: int
) -> Callable[..., Any]:
    """What calls `fn` through Dynamo; at most `limit` times compiled where Dynamo can count by itself."""
    told = weakref.ref(teller)

    def missed(failure: Any) -> None:
        known = told()
        if known is not None:
            known.missed(failure.orig_code.co_name, _short(failure.reason))

    options: dict[str, Any] = {"nopython": fullgraph, "dynamic": dynamic, "guard_fail_fn": missed}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options.update(recompile_limit=limit, isolate_recompiles=True)
    context: Any = torch._dynamo.optimize(backend, **options)
    if hasattr(context, "callback"):  # not where Dynamo is switched off
        context.callback = _Frames(context.callback, teller, fullgraph=fullgraph)
    made = context(fn)
    return made.forward if isinstance(fn, nn.Module) and made is not fn else made


def is_users_error(error: Exception) -> bool:
    """May eager raise here, too? An op has failed in Dynamo's hands."""
    return isinstance(error, exc.TorchRuntimeError | exc.ObservedException)


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

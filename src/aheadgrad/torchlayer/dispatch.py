"""Dispatch and function modes, op schemas, and what is active in this thread."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, handle_torch_function
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AUTOGRAD",
    "RELEASE",
    "VIEWS",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "active_function_modes",
    "as_called",
    "default_devices",
    "deterministic_mode",
    "deterministic_warns",
    "dispatch_modes",
    "dispatch_restored",
    "dual_level",
    "duals_hidden",
    "forward_ad",
    "function_modes",
    "hide",
    "hides",
    "in_transform",
    "is_composite",
    "is_mutable",
    "is_random",
    "is_view_op",
    "no_function_modes",
    "only_overload",
    "python_dispatcher",
    "schema_of",
    "transform_level",
    "without_mkldnn",
]

dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
transform_level = torch._C._functorch.maybe_current_level
in_transform = torch._C._functorch.is_functorch_wrapped_tensor
deterministic_mode = torch._C._get_deterministic_algorithms
deterministic_warns = torch._C._get_deterministic_algorithms_warn_only
_call_boxed = torch._C._dispatch_call_boxed
_find_op = torch._C._dispatch_find_schema_or_throw
AUTOGRAD, VIEWS = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
hides: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
hide: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
"""Do ops skip autograd, or what it knows of views and versions, and shall they? Half a context's time."""
no_function_modes = torch._C.DisableTorchFunction


def default_devices() -> tuple[str, ...] | None:
    """The devices of `torch.device` contexts (and `set_default_device`), innermost last.

    None when other modes over torch's functions are active as well.
    """
    if not function_modes():
        return ()
    stack = _get_current_function_mode_stack()
    if not all(type(mode) is DeviceContext for mode in stack):
        return None
    return tuple(str(mode.device) for mode in stack)


def active_function_modes() -> list[Any]:
    return list(_get_current_function_mode_stack())


@contextmanager
def python_dispatcher(*, on: bool) -> Iterator[None]:
    """Composite ops taken apart by torch's Python versions, which know symbolic sizes.

    (Torch switches it on as soon as the object is made, so that is done on entry.)
    """
    with torch._C._EnablePythonDispatcher() if on else nullcontext():
        yield


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """oneDNN kernels off. (`torch.backends.mkldnn.flags` warns about GPUs that are not there.)"""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def dispatch_restored() -> Iterator[None]:
    """Leaves transforms and dispatch keys as they were: a graph that raises does not undo what it entered."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, torch._C._dispatch_tls_local_exclude_set()):
        try:
            yield
        finally:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


class _Duals(threading.local):
    hidden = False


_duals = _Duals()


def dual_level() -> int:
    """The active forward-mode level, -1 when there is none."""
    level = int(forward_ad._current_level)
    return -1 if level >= 0 and _duals.hidden else level


@contextmanager
def duals_hidden(hidden: bool = True) -> Iterator[None]:
    """As if there were no forward-mode level, for tensors without tangents. (It cannot be left meanwhile.)"""
    before, _duals.hidden = _duals.hidden, hidden
    try:
        yield
    finally:
        _duals.hidden = before


@functools.cache
def is_random(op: object) -> bool:
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def tells_time(op: object) -> bool:
    """Is this a mark for the profiler (`record_function`), which computes nothing?"""
    return isinstance(op, OpOverload) and op.namespace == "profiler"


@functools.cache
def is_mutable(op: object) -> bool:
    return isinstance(op, OpOverload) and op._schema.is_mutable


@functools.cache
def is_view_op(op: object) -> bool:
    if not isinstance(op, OpOverload):
        return False
    first = op._schema.arguments[:1]
    return bool(first and first[0].alias_info is not None and not first[0].alias_info.is_write)


def without_frame(op: Any, args: Sequence[Any]) -> Any:
    """The function in C++ that an op calls, and that can be called with such arguments just as well."""
    if type(op) is not OpOverload:
        return op
    if op.namespace != "aten" or any(map(_is_number_for_tensor, args, op._schema.arguments)):
        return op._op
    return functools.partial(_call_boxed, _find_op(op._schema.name, op._schema.overload_name))


def _is_number_for_tensor(value: Any, argument: Any) -> bool:
    return isinstance(value, int | float | complex) and isinstance(argument.type, torch._C.TensorType)


def is_composite(op: OpOverload) -> bool:
    """Is the op made of other ops, above autograd?"""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def only_overload(op: Any) -> Any:
    """The overload that a call of an op means, if there is just one."""
    if not isinstance(op, OpOverloadPacket):
        return op
    names = op.overloads()
    return getattr(op, names[0]) if len(names) == 1 else op


def schema_of(op: OpOverload) -> Any:
    return op._schema


def as_called(func: FunctionType) -> FunctionType:
    """The function that told a mode of itself; for a mode's `__torch_function__`.

    Functions of torch name themselves as their module does. Where somebody has put one of his own in the
    place of `F.relu`, which calls the original, the original would tell of that, and it would run twice.
    """
    told = sys._getframe(2)
    caller = told.f_back
    if told.f_code is not handle_torch_function.__code__ or caller is None or _is_torchs(func.__globals__):
        return func
    code = caller.f_code
    if code is func.__code__ or code.co_freevars or not _is_torchs(caller.f_globals):
        return func
    return FunctionType(code, caller.f_globals)


def _is_torchs(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).partition(".")[0] == "torch"

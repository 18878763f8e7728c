"""From a function and its arguments to a call on flat inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.errors import FallbackError
from aheadgrad.frontends.plain import describe
from aheadgrad.program.slots import Slot, UserInput
from aheadgrad.recording.forward import Call, Scalar
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import can_be_traced, is_plain

# a subclass without a dispatch of its own still gives its type to every result
_EXACT = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


@dataclass(frozen=True, eq=False)
class Flat:
    """Arguments as leaves, with a readable path for each."""

    leaves: list[Any]
    spec: Any
    paths: list[str]
    top_paths: list[str]  # of the positional arguments themselves


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], parameter_names: list[str]) -> Flat:
    with_paths, spec = pytree.tree_flatten_with_path((args, kwargs), is_leaf=pytree.is_size)
    paths = [_path(path, parameter_names) for path, _ in with_paths]
    top = [_top(i, parameter_names) for i in range(len(args))]
    return Flat([leaf for _, leaf in with_paths], spec, paths, top)


def _top(i: int, names: list[str]) -> str:
    return names[i] if i < len(names) else f"args[{i}]"


def _path(path: tuple[Any, ...], names: list[str]) -> str:
    """`x`, `batch['tokens']`, `args[3]`: how the user would write it."""
    which, rest = path[0].idx, path[1:]
    if which == 0 and rest:
        head = _top(rest[0].idx, names)
    elif rest:
        head = str(rest[0].key)
    else:
        return "args"
    return head + "".join(map(_step, rest[1:]))


def _step(step: Any) -> str:
    """`['tokens']`, `[3]`, `.field`; keys are described without code of the user's."""
    return f"[{describe(step.key)}]" if hasattr(step, "key") else str(step)


def parameter_names(fn: Any) -> list[str]:
    """Of the positional parameters that a caller gives."""
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    code = getattr(fn, "__code__", None)
    return [] if code is None else list(code.co_varnames[hasattr(fn, "__self__") : code.co_argcount])


def takes_any_keyword(fn: Callable[..., Any]) -> bool:
    """Can the function see the order of its keyword arguments (`**kwargs`)?"""
    code = getattr(fn, "__code__", None)
    return code is None or bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _check_kind(path: str, t: Tensor) -> None:
    if can_be_traced(t):
        return
    if not is_plain(t) or type(t) not in _EXACT:
        raise FallbackError(f"argument {path} is a {type(t).__name__}, a tensor subclass")
    if t.layout is not torch.strided or t.is_quantized:
        kind = "quantized" if t.is_quantized else str(t.layout).removeprefix("torch.")
        raise FallbackError(f"argument {path} is {kind}, not a dense tensor")


def make_call(
    fn: Callable[..., Any], flat: Flat, state: list[tuple[Slot, Tensor]], around: Callable[[Any], Any]
) -> Call:
    """`state` are tensors to lift besides the arguments; `around(see)` swaps them in."""
    inputs = list(state)
    for slot, t in state:
        _check_kind(slot.describe(), t)
    scalars = []
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        if not isinstance(leaf, Tensor):
            scalars.append(Scalar(UserInput(path), leaf, len(inputs)))
        else:
            _check_kind(path, leaf)
            inputs.append((UserInput(path), leaf))

    def invoke(see: Callable[[Any], Any]) -> Any:
        args, kwargs = pytree.tree_unflatten([see(v) for v in flat.leaves], flat.spec)
        with around(see):
            return fn(*args, **kwargs)

    return Call(inputs, invoke, scalars=tuple(scalars))

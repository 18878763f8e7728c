"""Ops against their schemas: do these arguments fit? May a file name this op at all?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from aheadgrad.torchlayer.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket
from aheadgrad.torchlayer.symbols import Number

_NAMESPACES = ("aten", "prims", "_c10d_functional")
_OTHERS = ("inductor.resize_storage_bytes_.default",)  # which programs of aheadgrad's may have
_OPERATORS = (  # whose functions are graphs
    "cond while_loop while_loop_stack_output scan map_impl associative_scan auto_functionalized "
    "auto_functionalized_v2 with_effects flex_attention flex_attention_backward invoke_subgraph out_dtype "
    "run_and_save_rng_state run_with_rng_state wrap_with_set_grad_enabled wrap_with_autocast"
).split()
_NUMBERS = (int, float, complex, bool, Number)
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int, bool, Number),
    "float": (float, int, Number),
    "bool": (bool, int, Number),
    "complex": (complex, float, int),
    "str": (str,),
    "Device": (torch.device, str),
    "ScalarType": (torch.dtype,),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Generator": (),
}

IsTensor = Callable[[Any], bool]


def is_trusted(op: Any, namespaces: Collection[str]) -> bool:
    """Does an op only compute, as far as torch's own go? `namespaces` are trusted in addition."""
    if isinstance(op, HigherOrderOperator):
        return op.name() in _OPERATORS or op.name() in namespaces
    if isinstance(op, OpOverloadPacket):
        return any(is_trusted(getattr(op, name), namespaces) for name in op.overloads())
    if op.namespace in namespaces or str(op) in _OTHERS:
        return True
    opens_file = any(a.name == "filename" for a in op._schema.arguments)
    return op.namespace in _NAMESPACES and not opens_file and all(map(_known, _types(op)))


def _known(kind: str) -> bool:
    inner = _inside(kind)
    return _known(inner) if inner else kind in _KINDS or kind in ("Tensor", "number")


def _inside(kind: str) -> str:
    """What is optional, or in a list; nothing for anything else."""
    for outer in ("Optional[", "List["):
        if kind.startswith(outer):
            return kind[len(outer) : -1]
    return ""


@functools.cache
def _types(op: OpOverload) -> tuple[str, ...]:
    return tuple(str(a.real_type) for a in op._schema.arguments)


@functools.cache
def _arguments(op: OpOverload) -> tuple[tuple[str, str, bool, bool], ...]:
    """Name, type, whether it must be given, and whether only by name."""
    return tuple(
        (a.name, kind, not a.has_default_value(), a.kwarg_only)
        for a, kind in zip(op._schema.arguments, _types(op), strict=True)
    )


def misfit(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, is_tensor: IsTensor
) -> str | None:
    """What does not fit; None if everything does."""
    known = _arguments(op)
    positions = [a for a in known if not a[3]]
    if len(args) > len(positions):
        return f"it takes {len(positions)} arguments, not {len(args)}"
    given = {a[0]: v for a, v in zip(positions, args, strict=False)}
    for name, value in kwargs.items():
        if name in given or not any(a[0] == name for a in known):
            return f"{name} is given twice, or is none of its arguments"
        given[name] = value
    for name, kind, required, _ in known:
        if name in given:
            if not _fits(kind, given[name], is_tensor):
                return f"{name} is to be of the type {kind}, not {type(given[name]).__name__}"
        elif required:
            return f"{name} is missing"
    returns = [str(r.type) for r in op._schema.returns]
    if len(returns) > 1 and not (type(out) is tuple and len(out) == len(returns)):
        return f"it has {len(returns)} results"
    if returns == ["Tensor"] and type(out) is tuple:
        return "it has one result"
    return None


def _fits(kind: str, value: Any, is_tensor: IsTensor) -> bool:
    if kind in ("Tensor", "number"):  # torch takes either for the other; derivatives take None for a tensor
        return isinstance(value, _NUMBERS) or is_tensor(value) or (value is None and kind == "Tensor")
    inner = _inside(kind)
    if kind.startswith("Optional["):
        return value is None or _fits(inner, value, is_tensor)
    if inner:
        if isinstance(value, list | tuple):
            return all(_fits(inner, v, is_tensor) for v in value)
        return inner in ("int", "float", "bool") and _fits(inner, value, is_tensor)
    return kind not in _KINDS or isinstance(value, _KINDS[kind])

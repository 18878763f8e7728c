"""Things of torch by their names: dtypes, layouts, ops, classes of tensors. Nothing is imported for a name.

named_op("aten.mul.Tensor")      # the overload; NameError if this process has none
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import _OpNamespace

from aheadgrad.torchlayer.autograd import CreationMeta
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket


def _named(kind: type) -> dict[str, Any]:
    return {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}


DTYPES = _named(torch.dtype)
LAYOUTS = _named(torch.layout)
MEMORY_FORMATS = _named(torch.memory_format)
CREATIONS: dict[str, Any] = dict(CreationMeta.__members__)
RESHAPES: dict[str, Any] = {  # changes of shape in place, which tensor subclasses are told to make again
    name: getattr(Tensor, name)
    for name in "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_".split()
}
_RESHAPE_NAMES = {function: name for name, function in RESHAPES.items()} | {torch.as_strided_: "as_strided_"}


def reshape_name(function: Any) -> str | None:
    """What a change of shape in place is called; None for anything else."""
    try:
        return _RESHAPE_NAMES.get(function)
    except TypeError:  # no hash
        return None


def op_name(op: Any) -> str | None:
    """The full name of an op, all its overloads (`aten.mul`), or an operator that takes functions."""
    if isinstance(op, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return str(op)
    return None


def named_op(name: str) -> Any:
    """The op of that name; NameError if there is none. One that somebody defined may be defined anew."""
    return _torchs_op(name) if name.startswith(("aten.", "prims.")) else _find_op(name)


def _find_op(name: str) -> Any:
    parts = name.split(".")
    if not (len(parts) <= 3 and all(part.isidentifier() for part in parts)):
        raise NameError(name)
    found: Any = None
    if len(parts) == 1:
        from torch import _higher_order_ops  # noqa: F401  (they are known from then on)

        found = getattr(torch.ops.higher_order, name, None)
        wanted: type = HigherOrderOperator
    else:
        wanted = OpOverloadPacket if len(parts) == 2 else OpOverload
        space = getattr(torch.ops, parts[0], None)
        found = getattr(space, parts[1], None) if isinstance(space, _OpNamespace) else None
        if len(parts) == 3:
            found = getattr(found, parts[2], None) if isinstance(found, OpOverloadPacket) else None
    if not isinstance(found, wanted):
        raise NameError(name)
    return found


_torchs_op = functools.cache(_find_op)


def tensor_class(module: str, name: str) -> Any:
    """A class of tensors that this process knows; NameError if it does not."""
    todo: list[Any] = [Tensor]
    while todo:
        kind = todo.pop()
        if (kind.__module__, kind.__qualname__) == (module, name):
            return kind
        todo += type.__subclasses__(kind)
    raise NameError(f"{module}.{name}")

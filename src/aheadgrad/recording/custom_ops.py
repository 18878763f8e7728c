"""Custom ops that change their arguments: recorded as functions of these, and then written back.

mut(x, 2.0)      ->      _, x1 = auto_functionalized(mut, x=x, s=2.0);  x <- x1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.recording.records import tensors_among
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.control_flow import auto_functionalized
from aheadgrad.torchlayer.dispatch import OpOverload, is_composite, is_mutable, schema_of
from aheadgrad.torchlayer.subclasses import is_foreign

if TYPE_CHECKING:
    from aheadgrad.recording.session import Session

_TORCHS_NAMESPACES = ("aten", "prim", "prims", "inductor")


def changes_arguments(func: Any) -> bool:
    """Is this a custom op that writes to an argument?"""
    custom = isinstance(func, OpOverload) and func.namespace not in _TORCHS_NAMESPACES
    return custom and is_mutable(func) and not is_composite(func)


def call_changing(session: Session, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    schema = schema_of(func)
    if any(r.alias_info is not None for r in schema.returns):
        raise FallbackError(f"{func} returns one of its arguments, and changes it")
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written &= given.keys()
    _check(func, given)
    if any(isinstance(given[name], list | tuple) for name in written):
        raise FallbackError(f"{func} changes a list of tensors")
    changed = tensors_among(given[name] for name in given if name in written)
    before = [session.ledger.before_write(t) for t in changed]
    values = {name: _map(value, functional.latest) for name, value in given.items()}
    new = {name: _map(values[name], session.fake) for name in given if name in written}
    with functional.outside(), session.mode:
        out = func(**{**values, **new})
    results = out if isinstance(out, tuple) else (out,)
    order = [a.name for a in schema.arguments if a.name in new]
    record = session.trace.add
    record(auto_functionalized(), (func,), values, (*results, *(new[name] for name in order)))
    for name in order:
        for t, value in zip(tensors_among((given[name],)), tensors_among((new[name],)), strict=True):
            functional.replace(t, value)
            functional.commit_update(t)
            functional.sync(t)
            torch.autograd.graph.increment_version(t)
    for written_to in before:
        session.ledger.written(*written_to)
    return _map(out, session.wrap)


def _check(func: OpOverload, given: dict[str, Any]) -> None:
    for t in tensors_among(given.values()):
        if is_foreign(t):
            raise FallbackError(f"{func} changes its arguments, and is given a tensor subclass")
        if t.requires_grad and torch.is_grad_enabled():
            raise FallbackError(f"{func} changes its arguments, and is given one that requires grad")


def _map(value: Any, function: Any) -> Any:
    return pytree.tree_map(lambda v: function(v) if isinstance(v, Tensor) else v, value)

"""What eager refuses because of memory and leaves that the trace has in another form.

- A view with `as_strided` must lie inside its storage. The traced storage may have another size, so
  the real one is asked. (What lies inside the storage, but outside of the input, can be read only.)
- A view of a leaf that requires grad must not be changed in place. An input that is such a view enters
  with a history but without its base.
- Kernels refuse dtypes and indices that fake tensors let through. A later line may then fail to be
  recorded: eager would not have come so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import Geometry
from aheadgrad.recording.geometry import geometry_of
from aheadgrad.recording.overlaps import addresses, is_dense
from aheadgrad.torchlayer import functional, random
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.kernels import NotAsked, for_real, hints
from aheadgrad.torchlayer.memory import reach

_MOST_ADDRESSES = 1 << 16

if TYPE_CHECKING:
    from aheadgrad.recording.entrances import Entrance
    from aheadgrad.recording.session import Session


def check_bounds(
    session: Session, t: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> None:
    """Before `t.as_strided(size, stride, storage_offset)`."""
    if len(size) != len(stride) or any(n == 0 for n in size):
        return
    offset = t.storage_offset() if storage_offset is None else storage_offset
    needed = reach(size, stride, offset) * t.element_size()
    there = t.untyped_storage().nbytes()
    entrance = _entrance_in(session, t)
    if entrance is not None:
        there = max(there, entrance.real.untyped_storage().nbytes())
    if needed > there:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize "
            f"{t.element_size()} requiring a storage size of {needed} are out of bounds for storage of size "
            f"{there}"
        )
    if entrance is not None and not _lies_inside(size, stride, offset, t.element_size(), entrance.real):
        session.ledger.memory_known_by(entrance.storage).beyond = True


def _lies_inside(size: Sequence[Any], stride: Sequence[Any], offset: Any, width: int, whole: Tensor) -> bool:
    if is_dense(whole):
        first = whole.storage_offset() * whole.element_size()
        end = reach(size, stride, offset) * width
        return bool(first <= offset * width and end <= first + whole.numel() * whole.element_size())
    return width == whole.element_size() and _is_part(size, stride, offset, whole)


def _is_part(size: Sequence[Any], stride: Sequence[Any], offset: Any, whole: Tensor) -> bool:
    """Whether each of these addresses is that of an element; no if there are too many to tell."""
    numbers = [*size, *stride, offset, *whole.size(), *whole.stride(), whole.storage_offset()]
    if not all(type(n) is int for n in numbers) or max(math.prod(size), whole.numel()) > _MOST_ADDRESSES:
        return False
    with functional.outside():
        part, inside = Geometry(tuple(size), tuple(stride), offset), geometry_of(whole)
        return bool(torch.isin(addresses(part), addresses(inside)).all())


def check_reach(t: Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any) -> None:
    """Before `t.as_strided(...)` of a view is recorded as one of its base: gradients of what lies outside
    of the view are lost in eager."""
    if not (t.requires_grad and torch.is_grad_enabled()):
        return
    if not _is_part(size, stride, offset, t):
        raise FallbackError("as_strided takes from a view what lies outside of it")


def check_leaf_view(session: Session, t: Tensor) -> None:
    """Before `t` is changed in place."""
    if not torch.is_grad_enabled() or not t.requires_grad:
        return
    entrance = _entrance_in(session, t)
    if entrance is None or not _is_view_of(t, entrance.seen):
        return
    base = base_of(entrance.real)
    if base is not None and base.is_leaf and base.requires_grad:
        raise RuntimeError(
            "a view of a leaf Variable that requires grad is being used in an in-place operation."
        )


def _is_view_of(t: Tensor, seen: Tensor) -> bool:
    """In autograd's eyes, that is: not cut off with `detach`."""
    base = base_of(t)
    return t is seen or (base is not None and (base is seen or base is base_of(seen)))


def _entrance_in(session: Session, t: Tensor) -> Entrance | None:
    """The input in whose memory a tensor lies."""
    key = functional.storage_key(t)
    return next((e for e in session.entrances if e.storage == key), None)


def raised_before(session: Session) -> Exception | None:
    """What eager would have raised before it came to the line that failed to be recorded.

    Kernels refuse dtypes and indices that fake tensors let through. So the ops recorded until then are
    run on the real inputs, up to the first that raises.
    """
    if any(isinstance(e.real, FakeTensor) for e in session.entrances):
        return None
    known: dict[int, Any] = {id(e.value): e.real for e in session.entrances if e.form is None}

    def real(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return known[id(value)]
        if isinstance(value, Tensor) and (functional.is_wrapped(value) or type(value) is not Tensor):
            raise NotAsked
        return hints((value,))[0] if isinstance(value, torch.SymInt) else value

    with for_real(), random.preserved():
        for record in session.trace.records:
            target = record.target
            if not isinstance(target, OpOverload) or target.namespace != "aten" or is_mutable(target):
                return None
            try:
                args, kwargs = pytree.tree_map(real, (record.args, record.kwargs))
            except (KeyError, NotAsked):
                return None
            try:
                out = target(*args, **kwargs)
            except Exception as error:
                return error
            known.update({id(fake): now for fake, now in record.results(out)})
    return None

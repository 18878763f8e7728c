"""Changes of shape in place (`t_`, `unsqueeze_`, ...) on tensors that have views or are views.

Autograd replays views under functionalization, and a replay on a base that has changed shape in
place goes wrong, where eager would address memory. So the tensor itself stays as it is and a
proper view of it takes its place: from then on, wherever the user's code passes the tensor, the
view is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.recording.geometry import flattest
from aheadgrad.recording.ledger import Ledger, Line
from aheadgrad.recording.refusals import check_reach
from aheadgrad.torchlayer.autograd import CreationMeta, base_of, creation_meta, is_view

_T = torch.Tensor
OUT_OF_PLACE: dict[Any, Callable[..., Tensor]] = {
    _T.t_: _T.t,
    _T.transpose_: _T.transpose,
    _T.swapaxes_: _T.swapaxes,
    _T.swapdims_: _T.swapdims,
    _T.squeeze_: _T.squeeze,
    _T.unsqueeze_: _T.unsqueeze,
    _T.as_strided_: _T.as_strided,
    torch.as_strided_: _T.as_strided,
}


def reshape(
    ledger: Ledger, func: Any, original: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Handles a change of shape in place if it needs this; False when the op itself will do."""
    t = ledger.current(original)
    line, view = ledger.of(t), is_view(t)
    if not view and t.requires_grad and not torch.is_grad_enabled():
        _make_stale(ledger, t)
    counted = True
    if not view and OUT_OF_PLACE[func] is _T.as_strided:
        counted = math.prod(rest[0] if rest else kwargs["size"]) == t.numel()
        if not counted and line.viewed:
            raise FallbackError("as_strided_ shrinks or grows a tensor that has views")
    if came_to_require_grad(line):
        raise FallbackError("a view is reshaped in place after its base came to require grad")
    if not view and not line.viewed and t is original and counted:  # functionalization does not count again
        return False
    special = view and creation_meta(t) != CreationMeta.DEFAULT
    if t.requires_grad and not torch.is_grad_enabled() and (special or not view):
        if not counted:
            raise FallbackError("as_strided_ shrinks or grows a tensor that requires grad, under no_grad")
        return False
    _check_in_place(t)
    if view and base_of(t).dtype != t.dtype:  # type: ignore[union-attr]
        raise FallbackError("a view through another dtype is reshaped in place")
    if view and t.requires_grad and t.is_leaf:
        raise FallbackError("a view is reshaped in place after its base came to require grad")
    source = flattest(t) if OUT_OF_PLACE[func] is _T.as_strided else t
    if source is not t and len(rest) < 3 and "storage_offset" not in kwargs:
        kwargs = {**kwargs, "storage_offset": t.storage_offset()}
    if source is not t:
        check_reach(t, *rest, **{"offset" if k == "storage_offset" else k: v for k, v in kwargs.items()})
    tracked = t.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad():
        new = OUT_OF_PLACE[func](source, *rest, **kwargs)
    torch.autograd.graph.increment_version(new)
    ledger.disguise(original, new, tracked=tracked)
    ledger.of(base_of(new)).viewed = True  # type: ignore[arg-type]
    return True


def _make_stale(ledger: Ledger, base: Tensor) -> None:
    """The views of a base that is about to change its shape out of autograd's sight."""
    views = [line.tensor for line in ledger.views()] + [line.current for line in ledger.disguised]
    for view in views:
        if view is not base and base_of(view) is base:
            ledger.of(view).stale = ledger.has_stale = True


def came_to_require_grad(line: Line) -> bool:
    """A view, since it was taken, or since the call began. Eager takes it for a leaf, or not, depending on
    whether it was used in between."""
    given = None if line.given is None else line.given.real
    before = line.base_required_grad if given is None else given.requires_grad or not is_view(given)
    return not before and line.tensor.requires_grad


def _check_in_place(t: Tensor) -> None:
    """The checks that eager makes before it changes a tensor in place."""
    if not t.requires_grad or not torch.is_grad_enabled():
        return
    base = base_of(t)
    if base is None:
        if t.is_leaf:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        return
    if base.requires_grad and base.is_leaf:
        raise RuntimeError(
            "a view of a leaf Variable that requires grad is being used in an in-place operation."
        )
    if creation_meta(t) != CreationMeta.DEFAULT:
        raise RuntimeError(
            "a view that was created in no_grad mode, or by a function with several outputs, "
            "is being modified inplace."
        )

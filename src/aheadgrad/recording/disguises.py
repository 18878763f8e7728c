"""Changes of shape in place (`t_`, `unsqueeze_`, ...) on tensors that have views or are views.

Autograd replays views under functionalization, and a replay on a base that has changed shape in
place goes wrong, where eager would address memory. So the tensor itself stays as it is and a
proper view of it takes its place: from then on, wherever the user's code passes the tensor, the
view is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.recording.layouts import Layouts, flattest
from aheadgrad.recording.refusals import check_reach
from aheadgrad.torchlayer.autograd import CreationMeta, base_of, creation_meta, is_view, version

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


@dataclass(eq=False)
class Disguise:
    original: Tensor
    current: Tensor
    tracked: bool


@dataclass(frozen=True, eq=False)
class Parent:
    """Where a view was taken from, and in which grad mode."""

    view: Tensor
    source: Tensor
    with_grad: bool
    base_required_grad: bool


@dataclass(frozen=True, eq=False)
class InPlace:
    """A change of shape in place of a tensor subclass, which is made again as it is."""

    of: Tensor
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    with_grad: bool
    version: int  # of the tensor afterwards

    @property
    def tracked(self) -> bool:
        return self.with_grad and self.of.requires_grad

    @property
    def in_doubt(self) -> bool:
        """A view in sight of autograd that was written to since: eager makes its history again, from
        views that know nothing of the new shape."""
        return self.tracked and is_view(self.of) and version(self.of) != self.version


class Disguises:
    def __init__(self) -> None:
        self.worn: dict[int, Disguise] = {}
        self.viewed: set[int] = set()
        self.parents: dict[int, Parent] = {}
        self.stale: dict[int, Tensor] = {}  # views of a base that changed its shape under no_grad

    @contextmanager
    def off(self) -> Iterator[None]:
        """Tensors mean themselves: for our own calls on them."""
        worn, self.worn = self.worn, {}
        try:
            yield
        finally:
            self.worn = worn

    def current(self, t: Any) -> Any:
        """What is meant by a tensor now."""
        found = self.worn.get(id(t))
        return t if found is None else found.current

    def all_current(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            return self.current(values)
        if type(values) in (list, tuple):
            return type(values)(self.all_current(v) for v in values)
        if type(values) is dict:
            return {k: self.all_current(v) for k, v in values.items()}
        return values

    def originals(self, out: Any) -> Any:
        """What the user's code knows results as: a function that returns an argument returns the original."""
        if isinstance(out, Tensor):
            return next((d.original for d in self.worn.values() if d.current is out), out)
        if type(out) in (list, tuple):
            return type(out)(map(self.originals, out))
        return out

    def note(self, out: Any, args: tuple[Any, ...], layouts: Layouts) -> None:
        """Remembers which tensors have views, and where views come from."""
        if isinstance(out, Tensor):
            if is_view(out):
                base = base_of(out)
                if base is not None and id(base) not in self.viewed:
                    layouts.know(base)
                    self.viewed.add(id(base))
                layouts.know(out)
                source = args[0] if args else None
                if isinstance(source, Tensor) and source is not out:
                    mode, graded = torch.is_grad_enabled(), base is not None and base.requires_grad
                    self.parents.setdefault(id(out), Parent(out, source, mode, graded))
        elif type(out) in (list, tuple):
            for part in out:
                self.note(part, args, layouts)

    def has_views(self, t: Tensor) -> bool:
        now = self.current(t)
        return any(p.source is t or p.source is now for p in self.parents.values())

    def reshape(self, func: Any, original: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Handles a change of shape in place if it needs this; False when the op itself will do."""
        t = self.current(original)
        view = is_view(t)
        if not view and t.requires_grad and not torch.is_grad_enabled():
            views = (*(p.view for p in self.parents.values()), *(d.current for d in self.worn.values()))
            self.stale.update((id(v), v) for v in views if v is not t and base_of(v) is t)
        if not view and id(t) not in self.viewed and t is original:
            return False
        special = view and creation_meta(t) != CreationMeta.DEFAULT
        if t.requires_grad and not torch.is_grad_enabled() and (special or not view):
            return False
        _check_in_place(t)
        if view and base_of(t).dtype != t.dtype:  # type: ignore[union-attr]
            raise FallbackError("a view through another dtype is reshaped in place")
        parent = self.parents.get(id(t))
        if tracked_late(t, parent) or (view and t.requires_grad and t.is_leaf):
            raise FallbackError("a view is reshaped in place after its base came to require grad")
        source = flattest(t) if OUT_OF_PLACE[func] is _T.as_strided else t
        if source is not t and len(rest) < 3 and "storage_offset" not in kwargs:
            kwargs = {**kwargs, "storage_offset": t.storage_offset()}
        if source is not t:
            check_reach(t, *rest, **{"offset" if k == "storage_offset" else k: v for k, v in kwargs.items()})
        tracked = t.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            new = OUT_OF_PLACE[func](source, *rest, **kwargs)
        if not view and new.numel() != t.numel():
            raise FallbackError("as_strided_ shrinks or grows a tensor that has views")
        torch.autograd.graph.increment_version(new)
        before = self.worn.get(id(original))
        self.worn[id(original)] = Disguise(original, new, tracked or (before is not None and before.tracked))
        self.viewed.add(id(base_of(new)))
        return True

    def check_use(self, t: Tensor) -> None:
        """Eager makes the history of a stale view again, from the new shape; the trace has the old one."""
        while self.stale and t.requires_grad and torch.is_grad_enabled():
            if id(t) in self.stale:
                raise FallbackError(
                    "a tensor with a history changes its shape under no_grad, and a view from before is used"
                )
            parent = self.parents.get(id(t))
            if parent is None:
                return
            t = parent.source

    def detach(self, original: Tensor) -> None:
        """The tensor without its history; gradients still reach it from what was done before."""
        worn = self.worn.get(id(original))
        current = original if worn is None else worn.current
        self.worn[id(original)] = Disguise(original, current.detach(), worn is not None and worn.tracked)


def tracked_late(t: Tensor, parent: Parent | None) -> bool:
    """Eager takes such a view for a leaf, or not, depending on whether it was used in between."""
    return parent is not None and not parent.base_required_grad and t.requires_grad


def _check_in_place(t: Tensor) -> None:
    """The checks that eager makes before it changes a tensor in place."""
    if not t.requires_grad or not torch.is_grad_enabled():
        return
    base = base_of(t) if is_view(t) else None
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

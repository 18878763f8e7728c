"""What a recording cannot follow: it is noticed before it happens, and the call is left to eager.

A trace has the elements of a tensor, not the memory around them, and one history for each tensor. Changes of
shape, memory and history in place can ask for more: for elements that come back, for a history that ends
and begins again, for views that eager makes anew from what their base has become.

Each method is asked before something is done to a tensor, and remembers what later ones have to know.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import CreationMeta, creation_meta, is_view

if TYPE_CHECKING:
    from aheadgrad.recording.session import Session


class Limits:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.cut: set[int] = set()  # ids of inputs that were cut off from their histories
        self.beyond: set[Any] = set()  # storages of inputs of which more than the input is seen
        self._leaves: set[int] = set()  # ids of tensors that requires_grad_ was called on
        self._parted: set[Any] = set()  # storages of leaves that stopped requiring grad, and have views
        self._leaf_views: set[Any] = set()  # storages of views that requires_grad_ was called on
        self._moved: set[int] = set()  # ids of tensors that set_ was called on
        self._resized: set[int] = set()  # ids of inputs that resize_ or as_strided_ changed
        self._reshaped_in: dict[int, bool] = {}  # by id of an input: the grad mode of a change of shape

    def new_leaf(self, t: Tensor, *, wanted: bool) -> None:
        """Before `t.requires_grad_(wanted)`."""
        session, real = self.session, self.session.real_of(t)
        if real is not None and is_view(real) and creation_meta(real) != CreationMeta.DEFAULT:
            raise FallbackError("requires_grad is set on an input that is a view made under no_grad")
        if not wanted or (t.requires_grad and not _is_leaf(t)):
            return
        if is_view(t) or (real is not None and is_view(real)):
            if t.requires_grad:
                raise FallbackError(
                    "a view made under no_grad, of a tensor that requires grad, is made a leaf"
                )
            self._leaf_views.add(functional.storage_key(t))
        if not t.requires_grad and session.disguises.has_views(t):
            raise FallbackError("a tensor comes to require grad after views of it were taken")
        if session.is_input(t) and session.disguises.current(t) is not t:
            raise FallbackError("an input changes its shape or loses its history, and is then made a leaf")
        self._leaves.add(id(t))

    def end_of_history(self, t: Tensor, *, of_leaf: bool) -> None:
        """Before an input that requires grad is detached in place, or (a leaf) stops requiring grad.

        Views of a leaf from before keep their history. In the trace they have parted from it: neither may be
        written to from now on, nor can these views be made again for the caller.
        """
        if self.session.disguises.has_views(t):
            if not of_leaf:
                raise FallbackError("an input is cut off from its history after views of it were taken")
            self._parted.add(functional.storage_key(t))
        if id(t) in self._leaves and not of_leaf:
            raise FallbackError("an input is made a leaf, and then cut off from what was done with it")
        self.cut.add(id(t))

    def leaf_meanwhile(self, t: Tensor) -> bool:
        """Was an input made a leaf inside, and cut off again?"""
        return id(t) in self.cut and id(t) in self._leaves

    def results(self, outputs: list[Any]) -> None:
        """Before results are handed out."""
        for t in outputs if self._parted else ():
            if not isinstance(t, Tensor) or not t.requires_grad or self.session.is_input(t):
                continue
            if functional.storage_key(t) in self._parted:
                raise FallbackError("a view is returned of an input that stopped requiring grad since")

    def parted(self, t: Tensor) -> None:
        """Before a tensor is changed: may it have views, or be one, of a leaf that stopped requiring grad?"""
        if self._parted and functional.storage_key(t) in self._parted:
            raise FallbackError("an input stops requiring grad after views of it were taken, and is changed")

    def new_shape(self, t: Tensor) -> None:
        """Before an input changes its shape in place: its history has one of two such changes if autograd
        sees only one of them, and eager's gradients are then of the wrong shape."""
        if t.requires_grad and self.session.is_input(t):
            mode = torch.is_grad_enabled()
            if self._reshaped_in.setdefault(id(t), mode) is not mode:
                raise FallbackError(
                    "an input changes its shape with grad mode on, and again with grad mode off"
                )

    def new_size(self, t: Tensor, sizes: tuple[Any, ...] | None) -> None:
        """Before an input changes its shape in place: a second change could bring elements back. `sizes`
        are the arguments of `resize_` and `as_strided_`."""
        if not self.session.is_input(t):
            return
        if id(t) in self._resized or id(t) in self._moved:
            raise FallbackError(
                "an input is resized (resize_, as_strided_, set_), and changes its shape again"
            )
        if sizes is not None:
            size = sizes[0] if sizes and isinstance(sizes[0], list | tuple) else sizes
            if math.prod(n for n in size if isinstance(n, int | torch.SymInt)) != t.numel():
                self._resized.add(id(t))

    def write(self, t: Tensor) -> None:
        """Before a tensor is written to."""
        self.parted(t)
        if self._leaf_views and functional.storage_key(t) in self._leaf_views:
            raise FallbackError("a view is made a leaf, and its memory is written to")
        borrowed = self.session.recorder.borrowed
        if borrowed and not borrowed.isdisjoint(functional.value_storages(t)):
            raise FallbackError("memory of a numpy array, or of another buffer, is written to")

    def new_memory(self, t: Tensor, sources: tuple[Any, ...]) -> None:
        """Before `t.set_(source)`."""
        given = [s for s in sources if isinstance(s, Tensor)]
        if not functional.is_wrapped(t):
            if any(map(functional.is_wrapped, given)):
                raise FallbackError("set_ is called on a tensor from outside the arguments")
            return
        self.parted(t)
        real = self.session.real_of(t)
        if is_view(t) or (real is not None and is_view(real)):
            raise FallbackError("set_ is called on a view")
        if id(t) in self.session.disguises.worn or id(t) in self._resized:
            raise FallbackError("set_ is called on a tensor that changed its shape or lost its history")
        if any(functional.storage_key(s) == functional.storage_key(t) for s in given):
            raise FallbackError("set_ is called with another tensor in the same memory")
        if torch.is_grad_enabled() and any(s.requires_grad for s in (t, *given)):
            raise FallbackError("set_ is called with grad mode on, and a tensor that requires grad")
        if real is not None and functional.has_data_mutation(t):
            raise FallbackError("set_ is called on an input that was written to")
        self._moved.add(id(t))

    def wrapper(self, name: str) -> None:
        """Before a wrapper that talks to other processes around each call of its module."""
        raise FallbackError(
            f"{name} talks to other processes before and after each call of its module; "
            'compile what runs inside it, or use frontend="dynamo"'
        )


def _is_leaf(t: Tensor) -> bool:
    try:
        return t.is_leaf
    except RuntimeError:  # a view with a history that autograd refuses to look at by now
        return False

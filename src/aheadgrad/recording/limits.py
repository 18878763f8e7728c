"""What a recording cannot follow: it is noticed before it happens, and the call is left to eager.

A trace has the elements of a tensor, not the memory around them, and one history for each tensor. Changes of
shape, memory and history in place can ask for more: for elements that come back, for a history that ends
and begins again, for views that eager makes anew from what their base has become.

Each method is asked before something is done to a tensor, and remembers what later ones have to know.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.recording.ledger import Ledger
from aheadgrad.recording.records import tensors_among
from aheadgrad.recording.reshaping import came_to_require_grad
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import CreationMeta, base_of, creation_meta, is_view


class Limits:
    def __init__(self, ledger: Ledger, borrowed: set[Any]) -> None:
        self.ledger = ledger
        self.borrowed = borrowed  # storages of constants in memory of somebody else's
        self._has_parted = self._has_left = False

    def new_leaf(self, t: Tensor, *, wanted: bool) -> None:
        """Before `t.requires_grad_(wanted)`."""
        line, given = self.ledger.of(t), self.ledger.given(t)
        real = None if given is None else given.real
        if real is not None and is_view(real) and creation_meta(real) != CreationMeta.DEFAULT:
            raise FallbackError("requires_grad is set on an input that is a view made under no_grad")
        if came_to_require_grad(line):
            raise FallbackError("requires_grad is set on a view after its base came to require grad")
        if not wanted or (t.requires_grad and not _is_leaf(t)):
            return
        if is_view(t) or (real is not None and is_view(real)):
            if t.requires_grad:
                raise FallbackError(
                    "a view made under no_grad, of a tensor that requires grad, is made a leaf"
                )
            self.ledger.memory(t).leaf_views = True
        if not t.requires_grad and self.ledger.has_views(t):
            raise FallbackError("a tensor comes to require grad after views of it were taken")
        if given is not None and line.current is not t:
            raise FallbackError("an input changes its shape or loses its history, and is then made a leaf")
        line.made_leaf = True

    def end_of_history(self, t: Tensor, *, of_leaf: bool) -> None:
        """Before an input (or a tensor with views) that requires grad is detached in place, or (a leaf) stops
        requiring grad.

        Views of a leaf from before keep their history. In the trace they have parted from it: neither may be
        written to from now on, nor can these views be made again for the caller.
        """
        line = self.ledger.of(t)
        if self.ledger.has_views(t):
            if not of_leaf:
                raise FallbackError("a tensor is cut off from its history after views of it were taken")
            if any(map(_borrows_flag, self.ledger.memory(t).tensors)):
                raise FallbackError("an input stops requiring grad after a view was made of it under no_grad")
            self.ledger.memory(t).parted = self._has_parted = True
        if line.made_leaf and not of_leaf:
            raise FallbackError("an input is made a leaf, and then cut off from what was done with it")
        line.cut = True

    def results(self, outputs: list[Any]) -> None:
        """Before results are handed out. (Autograd takes views for such though there is nothing left that
        they have in common.)"""
        for t in outputs if self._has_parted or self._has_left else ():
            if not isinstance(t, Tensor) or self.ledger.given(t) is not None:
                continue
            memory = self.ledger.memory(t)
            if memory.parted and t.requires_grad:
                raise FallbackError("a view is returned of an input that stopped requiring grad since")
            if memory.left:
                raise FallbackError("a view is returned of an input that has other memory since (set_)")

    def parted(self, t: Tensor) -> None:
        """Before a tensor is changed: may it have views, or be one, of a leaf that stopped requiring grad?"""
        if self._has_parted and self.ledger.memory(t).parted:
            raise FallbackError("an input stops requiring grad after views of it were taken, and is changed")

    def new_shape(self, t: Tensor) -> None:
        """Before an input changes its shape in place: its history has one of two such changes if autograd
        sees only one of them, and eager's gradients are then of the wrong shape."""
        if self.ledger.memory(t).leaf_views:
            raise FallbackError("a view is made a leaf, and what it is a view of changes its shape")
        line = self.ledger.of(t)
        if t.requires_grad and line.given is not None:
            mode = torch.is_grad_enabled()
            if line.reshaped_in is (not mode):
                raise FallbackError(
                    "an input changes its shape with grad mode on, and again with grad mode off"
                )
            line.reshaped_in = mode

    def new_size(self, t: Tensor, sizes: tuple[Any, ...] | None) -> None:
        """Before an input changes its shape in place: a second change could bring elements back. `sizes`
        are the arguments of `resize_` and `as_strided_`."""
        line = self.ledger.of(t)
        if line.given is None:
            return
        if line.resized or line.moved:
            raise FallbackError(
                "an input is resized (resize_, as_strided_, set_), and changes its shape again"
            )
        if sizes is not None:
            size = sizes[0] if sizes and isinstance(sizes[0], list | tuple) else sizes
            line.resized = math.prod(n for n in size if isinstance(n, int | torch.SymInt)) != t.numel()

    def views(self, out: Any) -> None:
        """Of what a call has made: views made under no_grad require grad as long as their bases do."""
        for t in tensors_among((out,)) if self._has_parted and not torch.is_grad_enabled() else ():
            if is_view(t) and t.requires_grad and self.ledger.memory(t).parted:
                raise FallbackError("a view is made under no_grad of an input that stopped requiring grad")

    def write(self, t: Tensor) -> None:
        """Before a tensor is written to."""
        self.parted(t)
        if self.ledger.memory(t).leaf_views:
            raise FallbackError("a view is made a leaf, and its memory is written to")
        if t.requires_grad and torch.is_grad_enabled() and self._leads_to_an_offset(t):
            raise FallbackError("a view made with as_strided from an input at an offset is written to")
        if self.borrowed and not self.borrowed.isdisjoint(functional.value_storages(t)):
            raise FallbackError("memory of a numpy array, or of another buffer, is written to")

    def _leads_to_an_offset(self, t: Tensor) -> bool:
        """Gradients of what is written begin at their memory's start; `as_strided` counts from there."""
        given = self.ledger.given(base_of(t))
        return given is not None and bool(given.real.storage_offset()) and functional.is_restrided(t)

    def new_memory(self, t: Tensor, sources: tuple[Any, ...]) -> None:
        """Before `t.set_(source)`."""
        others = [s for s in sources if isinstance(s, Tensor)]
        if not functional.is_wrapped(t):
            if any(map(functional.is_wrapped, others)):
                raise FallbackError("set_ is called on a tensor from outside the arguments")
            return
        self.parted(t)
        line = self.ledger.of(t)
        if is_view(t) or (line.given is not None and is_view(line.given.real)):
            raise FallbackError("set_ is called on a view")
        if line.current is not t or line.resized or line.reshaped_in is not None:
            raise FallbackError("set_ is called on a tensor that changed its shape or lost its history")
        if any(functional.storage_key(s) == functional.storage_key(t) for s in others):
            raise FallbackError("set_ is called with another tensor in the same memory")
        if torch.is_grad_enabled() and any(s.requires_grad for s in (t, *others)):
            raise FallbackError("set_ is called with grad mode on, and a tensor that requires grad")
        if line.given is not None and functional.has_data_mutation(t):
            raise FallbackError("set_ is called on an input that was written to")
        if line.given is None and any(
            self.ledger.given(o) is not None for o in self.ledger.memory(t).tensors
        ):
            raise FallbackError("set_ is called on an alias of an input, whose version counter it shares")
        if line.given is not None and self.ledger.has_views(t):
            self.ledger.memory(t).left = self._has_left = True
        line.moved = True


def no_wrapper(name: str) -> None:
    """Before a wrapper that talks to other processes around each call of its module."""
    raise FallbackError(
        f"{name} talks to other processes before and after each call of its module; "
        'compile what runs inside it, or use frontend="dynamo"'
    )


def _borrows_flag(t: Tensor) -> bool:
    """Does a view require grad because its base does, having no history?"""
    return is_view(t) and t.requires_grad and _is_leaf(t)


def _is_leaf(t: Tensor) -> bool:
    try:
        return t.is_leaf
    except RuntimeError:  # a view with a history that autograd refuses to look at by now
        return False

"""A play is something done with a function, `play(run)`; eager and compiled have to end alike."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from .common import leaf, strict

Play = Callable[[Callable[..., Any]], Any]


def double(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    return leaf(*shape, seed=seed, dtype=torch.float64, grad=grad)


def ending(play: Play, run: Callable[..., Any]) -> Any:
    """What a play returns, or the error that ends it."""
    try:
        return play(run)
    except Exception as error:
        return error


def _gist(error: Exception) -> str:
    """An error's message up to its details."""
    return re.split(r"[:(\[]", str(error))[0].strip()


def assert_alike(expected: Any, found: Any, what: str = "", rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Same structure, dtypes, shapes, `requires_grad`; values equal up to the order of a sum."""
    if isinstance(expected, Exception) or isinstance(found, Exception):
        if not isinstance(expected, Exception):
            raise AssertionError(f"{what}: only the compiled function raises") from found
        if not isinstance(found, Exception):
            raise AssertionError(f"{what}: only eager raises") from expected
        same_kind = type(expected) is type(found) and _gist(expected) == _gist(found)
        assert same_kind, (what, expected, found)
        return
    left, right = tree_leaves(expected), tree_leaves(found)
    assert len(left) == len(right), (what, expected, found)
    for e, f in zip(left, right, strict=True):
        assert type(e) is type(f), (what, e, f)
        if not isinstance(e, Tensor):
            assert e == f, (what, e, f)
            continue
        assert e.requires_grad == f.requires_grad, (what, e, f)
        assert e.dtype is f.dtype and e.shape == f.shape, (what, e, f)
        rough = 100 * torch.finfo(e.dtype).eps if e.is_floating_point() or e.is_complex() else 0.0
        if not torch.allclose(f, e, rtol=max(rtol, rough), atol=max(atol, rough), equal_nan=True):
            raise AssertionError((what, e, f))


def agree(
    fn: Callable[..., Any], *plays: Play, refused: Sequence[Play] = (), calls: int = 2, **options: Any
) -> Any:
    """Eager once; compiled several times, with one compiled function for all plays.

    The plays in `refused` must raise, all others must not.
    """
    compiled = strict(fn, **options)
    for i, play in enumerate((*plays, *refused)):
        expected = ending(play, fn)
        if isinstance(expected, Exception) != (i >= len(plays)):
            raise AssertionError(f"play {i} ended otherwise in eager: {expected}") from (
                expected if isinstance(expected, Exception) else None
            )
        for call in range(calls):
            assert_alike(expected, ending(play, compiled), f"play {i}, call {call}")
    return compiled


def grad(out: Any, inputs: Any, *tangents: Any, **options: Any) -> Any:
    """`torch.autograd.grad` of a sum, or with tangents, with `create_graph` unless said otherwise."""
    options.setdefault("create_graph", True)
    if not tangents:
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        out = sum(t.sum() if not t.is_complex() else t.abs().sum() for t in outs)
    return torch.autograd.grad(out, inputs, *tangents, **options)


class Packs:
    """Saved-tensor hooks that take each tensor out of the graph, count it and remember how long it lives."""

    def __init__(self, to: torch.dtype | None = None) -> None:
        self.to = to
        self.packed = self.unpacked = 0
        self.refs: list[weakref.ref[Any]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, t: Tensor) -> Any:
        self.packed += 1
        held = Held(t.to(self.to) if self.to is not None and t.is_floating_point() else t, t.dtype)
        self.refs.append(weakref.ref(held))
        return held

    def unpack(self, held: Held) -> Tensor:
        self.unpacked += 1
        return held.t.to(held.dtype)

    @property
    def alive(self) -> int:
        return len([r for r in self.refs if r() is not None])


class Held:
    def __init__(self, t: Tensor, dtype: torch.dtype) -> None:
        self.t, self.dtype = t, dtype

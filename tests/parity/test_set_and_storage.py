"""Inputs whose memory is swapped (`set_`) or resized under them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
import aheadgrad.testing

from . import programs as p
from .common import WRITTEN, assert_same, relations, state, told_briefly, verify

GRAD = pytest.mark.parametrize("grad", [True, False])
KEPT = (True,)


@GRAD
def test_input_adopts_an_intermediate(grad: bool) -> None:
    def adopt_range(x: Tensor) -> Tensor:
        numbers = torch.arange(9, dtype=x.dtype).reshape(3, 3)
        with torch.no_grad():
            x.set_(numbers)
        return x * numbers

    verify(adopt_range, p.leaves(1, 3, 3, grad=grad), nonleaf=True, keep=KEPT)


def test_intermediate_adopts_a_view_of_another() -> None:
    def adopt_a_row(x: Tensor, y: Tensor) -> Tensor:
        first, second = x.mul(2), y.mul(2)
        row = second[1].view(3, 3)
        first.set_(row)
        first.view(-1).mul_(2)
        return first * row

    verify(adopt_a_row, lambda: [torch.randn(3, 3), torch.randn(3, 9)], keep=KEPT)


@GRAD
def test_adopted_input_changed_afterwards(grad: bool) -> None:
    make = p.leaves(2, 3, 3, grad=grad)
    verify(p.adopt_then_double_source, make, nonleaf=True, keep=KEPT, skip=["who is whom"])


@pytest.mark.differs_from_peer("the two inputs do not share memory afterwards")
@GRAD
def test_adopted_input_shares_its_memory_afterwards(grad: bool) -> None:
    verify(p.adopt_then_double_source, p.leaves(2, 3, 3, grad=grad), nonleaf=True, keep=KEPT)


def _nonleaf_inputs() -> aheadgrad.testing.Inputs:
    leaf = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
    return aheadgrad.testing.Inputs(args=(leaf + 1,), leaves=[leaf])


def test_alias_changed_after_its_base_adopted_other_memory() -> None:
    """torch refuses; we run the call uncompiled, and say so."""

    def adopt_then_double_old_memory(x: Tensor) -> Tensor:
        old = x.view(-1)
        other = torch.ones(3, 3, requires_grad=True)
        with torch.no_grad():
            x.set_(other)
            old.mul_(2)
        return x + other

    compiled = aheadgrad.compile(adopt_then_double_old_memory, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", aheadgrad.errors.FallbackWarning)
        aheadgrad.testing.assert_same(adopt_then_double_old_memory, compiled, _nonleaf_inputs)
    assert list(compiled.fallbacks) == ["memory that an input had before set_ is written to"]


@pytest.mark.differs_from_peer("refused")
def test_input_changed_after_it_adopted_another() -> None:
    def adopt_then_double(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.set_(y)
        x.mul_(2)
        return x + y

    verify(adopt_then_double, p.leaves(2, 3, 3), nonleaf=True, keep=KEPT)


@GRAD
def test_adoption_taken_back(grad: bool) -> None:
    verify(p.adopt_and_come_back, p.leaves(1, 3, 3, grad=grad), nonleaf=True, keep=KEPT, skip=[WRITTEN])


@pytest.mark.differs_from_peer("the version counter stays")
def test_adoption_taken_back_counts_as_written() -> None:
    verify(p.adopt_and_come_back, p.leaves(1, 3, 3), nonleaf=True, keep=KEPT)


# -- storage resized -----------------------------------------------------------------------------


def same_after_refill(
    entry: Callable[..., Any],
    fn: Callable[..., Any],
    make: Callable[[], Sequence[Tensor]],
    refill: Callable[..., None] | None = None,
) -> None:
    """Compare the call, then give emptied inputs their memory back (`refill`) and compare gradients."""

    def run(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
        torch.manual_seed(0)
        inputs = list(make())
        out = fn(*inputs)
        seen: list[tuple[str, Any]] = [
            ("inputs", [state(t) for t in inputs]),
            ("storage", [t.untyped_storage().nbytes() for t in inputs]),
        ]
        if out is None:
            return seen
        seen += [("output", state(out)), ("relations", relations([*inputs, out]))]
        if refill is not None:
            refill(*inputs)
            grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
            seen.append(("gradients", list(grads)))
        return seen

    with told_briefly():
        found = run(entry(fn, keep_inference_input_mutations=True))
    assert_same(found, run(fn))


def _refill(x: Tensor, data: Tensor) -> None:
    """Out of autograd's sight, as whoever shards parameters does it."""
    x.untyped_storage().resize_(data.numel() * data.element_size())
    x.data.copy_(data)


def test_storage_resized_up(entry: Callable[..., Any]) -> None:
    same_after_refill(entry, p.grow_and_fill, p.hollow(8), lambda _x: None)


def test_storage_resized_down_without_backward(entry: Callable[..., Any]) -> None:
    same_after_refill(entry, p.sine_then_empty, p.leaves(1, 8))


@pytest.mark.differs_from_peer("resizes once more in the backward, which then reads freed memory", run=False)
def test_storage_resized_down(entry: Callable[..., Any]) -> None:
    def make() -> list[Tensor]:
        return [torch.linspace(0, 1, 8).requires_grad_()]

    same_after_refill(entry, p.sine_then_empty, make, lambda x: _refill(x, torch.linspace(0, 1, 8)))


@pytest.mark.differs_from_peer("crashes; its own test of this is commented out", run=False)
def test_storage_resized_up_and_down(entry: Callable[..., Any]) -> None:
    same_after_refill(entry, p.grow_fill_sine_empty, p.hollow(8), lambda x: _refill(x, torch.ones(8)))


@pytest.mark.differs_from_peer("its graph cannot be run; its own test of this is skipped")
def test_storage_adopted_and_resized_down(entry: Callable[..., Any]) -> None:
    def refill(stand_in: Tensor, shard: Tensor) -> None:
        _refill(stand_in, torch.cat([shard, shard]).detach())

    same_after_refill(entry, p.gather_use_empty, p.hollow(16, 8), refill)


def test_storage_resized_down_before_adopting(entry: Callable[..., Any]) -> None:
    def empty_then_adopt(x: Tensor) -> None:
        with torch.no_grad():
            torch.ops.inductor.resize_storage_bytes_(x, 0)
            x.set_(torch.ones(2))

    same_after_refill(entry, empty_then_adopt, p.leaves(1, 8))


def double_then_empty(x: Tensor) -> Tensor:
    x.mul_(2)
    torch.ops.inductor.resize_storage_bytes_(x, 0)
    return x


@pytest.mark.differs_from_peer("crashes; its own test of this is commented out", run=False)
def test_changed_input_resized_down(entry: Callable[..., Any]) -> None:
    same_after_refill(entry, double_then_empty, lambda: [torch.randn(8, requires_grad=True) + 1])
    same_after_refill(entry, double_then_empty, lambda: [torch.randn(8)])


@pytest.mark.differs_from_peer("crashes; its own test of this is commented out", run=False)
def test_changed_leaf_resized_down_is_refused_as_in_eager(entry: Callable[..., Any]) -> None:
    x = torch.zeros(8, requires_grad=True)
    for fn in (double_then_empty, entry(double_then_empty, keep_inference_input_mutations=True)):
        with pytest.raises(RuntimeError):
            fn(x)
    assert x.untyped_storage().nbytes() == 32

"""Each private symbol of torch that we rely on does what we rely on."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from aheadgrad.torchlayer import autocast, autograd, dispatch, functional, guards, random
from aheadgrad.torchlayer.fake import FakeTensor, fake_like, mode_of, new_mode
from aheadgrad.torchlayer.fxnames import Names
from aheadgrad.torchlayer.opcache import OpCache


def test_functional_wrappers_see_writes_through_views() -> None:
    mode = new_mode(dynamic=False)
    fake = fake_like(mode, torch.zeros(2, 3))
    with functional.enabled():
        x = functional.wrap(fake)
        assert functional.is_wrapped(x) and functional.unwrap(x) is fake
        assert not functional.has_data_mutation(x)
        with mode:
            x.t()[0].mul_(2)
            functional.sync(x)
        assert functional.has_data_mutation(x)
        assert not functional.has_metadata_mutation(x)
        with mode:
            x.t_()
        assert functional.has_metadata_mutation(x)


def test_views_have_steps_that_can_be_replayed() -> None:
    mode = new_mode(dynamic=False)
    fake = fake_like(mode, torch.zeros(2, 3))
    with functional.enabled(), mode:
        x = functional.wrap(fake)
        view = x.t()[1]
    steps = functional.view_steps(view)
    assert [type(s).__name__ for s in steps] == ["t_ViewMeta", "select_int_ViewMeta"]
    assert functional.same_step(steps[0], functional.view_steps(view)[0])
    real = torch.arange(6.0).view(2, 3)
    assert torch.equal(functional.replay_steps(real, steps), real.t()[1])
    assert functional.storage_key(view) == functional.storage_key(x)


def test_steps_that_cannot_be_read_are_known_by_identity() -> None:
    """`as_tuple` of these two refers to freed memory in torch: equal steps differed, or it crashed."""
    mode = new_mode(dynamic=False)
    x, y = (functional.wrap(fake_like(mode, torch.zeros(6))) for _ in range(2))
    with functional.enabled(), mode:
        view = torch.ops.aten._unsafe_view.default(x, [2, 3])
        further = view.t()
        y.resize_(2, 2)
        part = y[0]
        other = torch.ops.aten._unsafe_view.default(x, [3, 2])
    for first, second in ((view, further), (y, part)):
        old, new = functional.view_steps(first), functional.view_steps(second)
        assert len(old) == 1 and len(new) == 2
        assert functional.same_step(old[0], new[0])
    assert not functional.same_step(functional.view_steps(view)[0], functional.view_steps(other)[0])


def test_fakes_keep_geometry_and_device() -> None:
    mode = new_mode(dynamic=False)
    real = torch.zeros(4, 6)[1:, ::2].t()
    fake = fake_like(mode, real)
    assert isinstance(fake, FakeTensor)
    assert (fake.size(), fake.stride(), fake.storage_offset()) == (
        real.size(),
        real.stride(),
        real.storage_offset(),
    )
    assert fake.device == real.device and mode_of([None, fake]) is mode


def test_remembered_results_equal_computed_ones() -> None:
    mode = new_mode(dynamic=False)
    ops = OpCache(mode)
    a, b = (fake_like(mode, torch.zeros(3, 4).t()) for _ in range(2))
    args: tuple[object, ...]
    for op, args in (
        (torch.ops.aten.add.Tensor, (a, b)),
        (torch.ops.aten.t.default, (a,)),
        (torch.ops.aten.split.Tensor, (a, 2)),
    ):
        first = ops.compute(op, (FakeTensor,), args, {})
        again = ops.compute(op, (FakeTensor,), args, {})
        one, two = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (first, again))
        assert all(x is not y for x, y in zip(one, two, strict=True))
        assert [(x.size(), x.stride(), x.dtype) for x in one] == [
            (y.size(), y.stride(), y.dtype) for y in two
        ]


def test_version_counters_can_be_read_and_set() -> None:
    x = torch.zeros(2)
    autograd.set_version(x, 5)
    assert autograd.version(x) == autograd.version(x.detach()) == 5
    assert autograd.same_version_counter(x, x.detach())
    assert not autograd.same_version_counter(x, x.data)
    assert autograd.version(x) == 5


def test_creation_flags_tell_how_a_view_was_made() -> None:
    x = torch.zeros(2, 2, requires_grad=True)
    with torch.no_grad():
        quiet = x.view(-1)
    assert autograd.creation_meta(quiet) == autograd.CreationMeta.NO_GRAD_MODE
    assert autograd.creation_meta(x.unbind(0)[0]) == autograd.CreationMeta.MULTI_OUTPUT_NODE
    assert autograd.creation_meta(x.view(-1)) == autograd.CreationMeta.DEFAULT
    assert autograd.base_of(quiet) is x and autograd.is_view(quiet)


def test_bare_apply_makes_a_node() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(_ctx, given):  # type: ignore[no-untyped-def]
            return (given.pop() if autograd.gives_tangents_away else given) * 2

    x = torch.ones(2, requires_grad=True)
    out = autograd.bare_apply(Double)(x)
    assert torch.equal(out.grad_fn.apply(torch.ones(2)), torch.full((2,), 2.0))
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_saved_tensor_hooks_are_off_inside_the_shield() -> None:
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with autograd.saved_tensor_hooks_off():
            _ = x * x
        assert packed == []
        _ = x * x
    assert len(packed) == 2


def test_op_kinds() -> None:
    aten = torch.ops.aten
    assert dispatch.is_random(aten.bernoulli.p) and not dispatch.is_random(aten.mul.Tensor)
    assert dispatch.is_mutable(aten.add_.Tensor) and not dispatch.is_mutable(aten.add.Tensor)
    assert dispatch.is_view_op(aten.t.default) and not dispatch.is_view_op(aten.clone.default)
    assert dispatch.transform_level() is None and dispatch.dual_level() < 0


def test_tensor_guards_notices_every_property() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(3)
    check = guards.tensor_guards([a, b]).check
    assert check(a, b) and check(torch.ones(2, 3), torch.ones(3))
    for other in (
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        a.double(),
        torch.zeros(2, 3, requires_grad=True),
    ):
        assert not check(other, b)
    assert not guards.tensor_guards([a, torch.ones(2, 3)]).check(a, a)


def test_names_follow_fx() -> None:
    names = Names()
    assert [names.fresh(n) for n in ("mul", "mul", "sum", "view")] == ["mul", "mul_1", "sum_1", "view"]


def test_random_state_is_kept() -> None:
    before = torch.get_rng_state()
    with random.preserved():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


def test_autocast_is_a_value() -> None:
    assert autocast.autocast_state() is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = autocast.autocast_state()
        assert state is not None and dict(state.enabled) == {"cpu": torch.bfloat16}
        with state.suspended():
            assert autocast.autocast_state() is None
        assert autocast.autocast_state() == state
    with state.active():
        assert autocast.autocast_state() == state
    assert autocast.autocast_state() is None


class OwnDict(dict[str, int]):
    pass


told_of_changes = pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0),
    reason="Python 3.13.0 does not tell of all changes: no check holds there",
)


@told_of_changes
@pytest.mark.parametrize("kind", [dict, OrderedDict, OwnDict])
@pytest.mark.parametrize("contents", [{}, {"a": 1}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_changed_dictionary_is_noticed(kind: Any, contents: dict[str, int], place: int) -> None:
    tables = ({"k": 1}, kind(contents), dict[str, int]())
    check, things = guards.unchanged_check(tables)
    assert all(check(things) for _ in range(4))
    tables[place]["a"] = 2
    assert not check(things)
    again, others = guards.unchanged_check(tables)
    assert again(others) and again(others)
    del tables[place]["a"]
    assert not again(others)
    assert not check(things)


@told_of_changes
def test_an_empty_dictionary_that_is_filled_at_once_is_noticed() -> None:
    tables = ({"k": 1}, dict[str, int](), {"l": 2})
    check, things = guards.unchanged_check(tables)
    assert all(check(things) for _ in range(4))
    tables[1].update({"a": 1})
    assert not check(things)


def test_a_changed_tensor_is_noticed() -> None:
    tensors = [torch.ones(2, 3), torch.ones(4, requires_grad=True)]
    check = guards.tensor_guards(tensors).check
    assert check(*tensors)
    tensors[1].requires_grad_(False)
    assert not check(*tensors)
    tensors[1].requires_grad_(True)
    assert check(*tensors)
    tensors[0].t_()
    assert not check(*tensors)
    tensors[0].t_()
    tensors[0].data = torch.ones(2, 3, dtype=torch.float64)
    assert not check(*tensors)
    tensors[0].data = torch.ones(3, 2).t()
    assert not check(*tensors)


def around_the_call() -> dict[str, AbstractContextManager[Any]]:
    return {
        "inference mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("what", around_the_call())
def test_the_check_of_a_tensor_sees_what_is_active(what: str) -> None:
    """Guards rely on it: they do not ask for these again."""
    t = torch.ones(3)
    check = guards.tensor_guards([t]).check
    with around_the_call()[what]:
        assert not check(t)
        inside = guards.tensor_guards([t]).check
        assert inside(t)
    assert check(t) and not inside(t)


@pytest.mark.parametrize(
    "transform", [torch.vmap, torch.func.grad, torch.func.functionalize, torch.func.jacfwd]
)
def test_the_check_of_a_tensor_sees_transforms(transform: Any) -> None:
    t = torch.ones(3)
    check = guards.tensor_guards([t]).check
    seen: list[bool] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(check(t))
        return x.sum()

    transform(inside)(torch.ones(3))
    assert seen == [False]
    assert check(t)


@told_of_changes
@pytest.mark.parametrize("check_first", [True, False])
def test_a_check_of_dictionaries_and_what_it_holds_end_in_any_order(check_first: bool) -> None:
    tables = tuple({"k": i} for i in range(3))
    check, things = guards.unchanged_check(tables)
    assert check(things) and check(things)
    left = [things, check] if check_first else [check, things]
    del check, things
    while left:
        left.pop()
        gc.collect()
        for table in tables:
            table["k"] += 1

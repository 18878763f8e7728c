"""Memory is freed as early as in eager, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .common import leaf, strict


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Held:
    """A tensor with a death notice."""

    def __init__(self, t: Tensor) -> None:
        self.t = t


def fn(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin() * 2).exp().sum()


def live_tensors() -> int:
    return sum(1 for o in gc.get_objects() if issubclass(type(o), Tensor))


def warm(compiled: Callable[..., Any]) -> None:
    for _ in range(2):
        compiled(leaf(4, 4), leaf(4, 4, seed=1)).sum().backward()


def test_saved_tensors_die_with_the_backward() -> None:
    compiled = strict(fn)
    warm(compiled)
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    saved: list[Any] = []

    def pack(t: Tensor) -> Any:
        held = Held(t)
        saved.append(weakref.ref(held))
        return held

    with saved_tensors_hooks(pack, lambda held: held.t):
        out = compiled(x, w)
    assert saved
    assert all(r() is not None for r in saved)
    out.backward()
    assert all(r() is None for r in saved)


def test_saved_tensors_die_with_an_unused_output() -> None:
    compiled = strict(fn)
    warm(compiled)
    saved: list[Any] = []

    def pack(t: Tensor) -> Any:
        held = Held(t)
        saved.append(weakref.ref(held))
        return held

    with saved_tensors_hooks(pack, lambda held: held.t):
        out = compiled(leaf(4, 4), leaf(4, 4, seed=1))
    assert all(r() is not None for r in saved)
    del out
    assert all(r() is None for r in saved)


@pytest.mark.parametrize("backward", [True, False])
def test_no_tensors_are_left(backward: bool) -> None:
    compiled = strict(fn)
    warm(compiled)
    gc.collect()
    before = live_tensors()
    for _ in range(5):
        out = compiled(leaf(4, 4), leaf(4, 4, seed=1))
        if backward:
            out.backward()
        del out
    assert live_tensors() == before


def test_no_garbage_is_made() -> None:
    compiled = strict(fn)
    warm(compiled)
    gc.collect()
    for _ in range(5):
        compiled(leaf(4, 4), leaf(4, 4, seed=1)).backward()
    assert gc.collect() == 0


def test_inputs_are_not_kept() -> None:
    compiled = strict(fn)
    warm(compiled)
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    refs = [weakref.ref(x), weakref.ref(w)]
    compiled(x, w).backward()
    del x, w
    assert all(r() is None for r in refs)


def test_the_inputs_of_the_compiling_call_are_not_kept() -> None:
    compiled = strict(fn)
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    refs = [weakref.ref(x), weakref.ref(w)]
    compiled(x, w).backward()
    del x, w
    gc.collect()
    assert all(r() is None for r in refs)


def test_outputs_are_not_kept() -> None:
    compiled = strict(lambda x: (x.sin(), x.exp(), x * 2))
    x = leaf(3)
    for _ in range(2):
        outs = compiled(x)
        refs = [weakref.ref(o) for o in outs]
        del outs
        assert all(r() is None for r in refs)


def test_an_output_keeps_nothing_else_alive() -> None:
    """A small result must not hold the big intermediate it was cut from."""
    compiled = strict(lambda x: ((x * 2)[:1].clone(), (x * 3).sum()))
    for out in compiled(leaf(1000, grad=False)):
        assert out.untyped_storage().nbytes() <= 4


def test_an_output_without_gradient_keeps_no_graph() -> None:
    compiled = strict(lambda x: (x.exp(), (x.exp() * 2).detach()))
    x = leaf(3)
    compiled(x)
    a, b = compiled(x)
    ref = weakref.ref(a)
    del a
    assert ref() is None
    assert b.grad_fn is None


def test_one_output_freed_while_the_other_lives() -> None:
    def two_parts(a: Tensor, b: Tensor) -> Any:
        return (a * 2).sin() * 2, (b * 3).sin() * 2

    def alive(run: Any) -> list[int]:
        saved: list[Any] = []

        def pack(t: Tensor) -> Any:
            held = Held(t)
            saved.append(weakref.ref(held))
            return held

        with saved_tensors_hooks(pack, lambda held: held.t):
            x, y = run(leaf(3, seed=1), leaf(3, seed=2))
        counts = [len([r for r in saved if r() is not None])]
        del x
        counts.append(len([r for r in saved if r() is not None]))
        y.sum().backward()
        counts.append(len([r for r in saved if r() is not None]))
        return counts

    compiled = strict(two_parts)
    for _ in range(2):
        before, between, after = alive(compiled)
        assert before > between > after == 0
    assert alive(two_parts)[2] == 0


def test_gradients_are_not_kept() -> None:
    compiled = strict(fn)
    warm(compiled)
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    compiled(x, w).backward()
    ref = weakref.ref(x.grad)
    x.grad = None
    assert ref() is None


def test_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    compiled = strict(model)
    for _ in range(2):
        compiled(leaf(3, 4)).sum().backward()
        model.zero_grad()
    gc.collect()
    before = live_tensors()
    for _ in range(3):
        compiled(leaf(3, 4)).sum().backward()
        model.zero_grad()
    assert live_tensors() == before


def test_a_dropped_compiled_function_is_freed() -> None:
    def make() -> Any:
        w = leaf(3)
        return strict(lambda x: x * w), weakref.ref(w)

    compiled, kept = make()
    compiled(leaf(3)).sum().backward()
    ref = weakref.ref(compiled)
    del compiled
    gc.collect()
    assert ref() is None
    assert kept() is None


def test_a_dropped_module_is_freed() -> None:
    compiled = strict(nn.Linear(3, 3))
    compiled(leaf(2, 3)).sum().backward()
    ref = weakref.ref(compiled.weight)
    del compiled
    gc.collect()
    assert ref() is None


def test_compiling_leaves_no_tensors_of_the_user() -> None:
    """What the compiling call was given and gave back may go."""
    compiled = strict(lambda x: x.exp())
    x = leaf(3)
    out = compiled(x)
    refs = [weakref.ref(x), weakref.ref(out)]
    del x, out
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_an_error_keeps_nothing() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 2
        raise ValueError(str(y.shape))

    compiled = strict(broken)
    x = leaf(3)
    ref = weakref.ref(x)
    with pytest.raises(ValueError):
        compiled(x)
    del x
    gc.collect()
    assert ref() is None

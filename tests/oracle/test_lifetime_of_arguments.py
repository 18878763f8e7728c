"""Whatever becomes of a call, nothing keeps its arguments, or what it found in attributes.

Without the garbage collector: neither an entry nor a cycle of our objects holds on to them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad
from aheadgrad.compat import aot_function, aot_module, aot_module_simplified, nop

from .common import assert_equal, leaf, strict

pytestmark = pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    torch.compiler.reset()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Calls(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        first, *others = self.fn(x, y)
        return first * self.scale, *others


def simplified(fn: Any) -> Any:
    module, made = Calls(fn), list[Any]()

    def call(*args: Tensor) -> Any:
        if not made:
            made.append(aot_module_simplified(module, args, nop))
        return made[0](*args)

    return call


WAYS: dict[str, Callable[[Any], Any]] = {
    "trace": strict,
    "trace, any size": lambda fn: strict(fn, dynamic=True),
    "dynamo": aheadgrad.compile,
    "dynamo, any size": lambda fn: aheadgrad.compile(fn, dynamic=True),
    "torch.compile": lambda fn: torch.compile(fn, backend="aheadgrad"),
    "aot_function": lambda fn: aot_function(fn, nop),
    "aot_module": lambda fn: aot_module(Calls(fn), nop),
    "aot_module_simplified": simplified,
}


def plain(x: Tensor, y: Tensor) -> Any:
    return ((x @ y).sin().exp(),)


def changes(x: Tensor, y: Tensor) -> Any:
    return x.mul_(2).sin() + y, x.view(-1)


def pair(seed: int) -> Any:
    halves = (leaf(4, 4, seed=seed + k, grad=False) for k in (0, 1))
    return TwoTensor(*halves).requires_grad_()


def two() -> tuple[Tensor, ...]:
    return leaf(4, 4), leaf(4, 4, seed=1)


def overlapping() -> tuple[Tensor, ...]:
    whole = leaf(8, 4, grad=False)
    return whole[:4], whole[2:6]


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "with grad": (plain, two),
    "without": (plain, lambda: tuple(t.detach() for t in two())),
    "with a history": (plain, lambda: tuple(t * 2 for t in two())),
    "changed": (changes, lambda: (leaf(4, 4, grad=False), leaf(4, 4, seed=1))),
    "overlapping": (changes, overlapping),
    "subclass": (plain, lambda: (pair(0), pair(2))),
}


class Watched:
    """Which of some tensors (or their parts, or their memory) are still there."""

    def __init__(self, *tensors: Tensor) -> None:
        parts = [p for t in tensors for p in ((t.a, t.b) if isinstance(t, TwoTensor) else (t,))]
        held = [*tensors, *parts, *(p.untyped_storage() for p in parts)]
        self.refs = [weakref.ref(t) for t in held]

    def alive(self) -> list[str]:
        return [type(r()).__name__ for r in self.refs if r() is not None]


def train(outs: Any, args: tuple[Any, ...]) -> None:
    out = outs[0]
    if out.requires_grad:
        out.sum().backward()


def second_order(outs: Any, args: tuple[Any, ...]) -> None:
    wanted = [t for t in args if t.requires_grad and not isinstance(t, TwoTensor)]
    if wanted:
        grads = torch.autograd.grad(outs[0].sum(), wanted, create_graph=True)
        for g in grads:
            if g.requires_grad:
                g.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_compiles(way: str, call: str) -> None:
    fn, make = CALLS[call]
    for after in (train, second_order):
        compiled = WAYS[way](fn)
        args = make()
        watched = Watched(*args)
        outs = compiled(*args)
        after(outs, args)
        del args, outs
        assert not watched.alive(), after.__name__


@pytest.mark.parametrize("way", ["trace", "dynamo"])
def test_capture_and_calls_without_grad_mode(way: str) -> None:
    compiled = WAYS[way](plain)
    args = two()
    watched = Watched(*args)
    with torch.no_grad():
        compiled(*args)
    captured = aheadgrad.capture(plain, *args)
    del args
    assert captured.facts is not None
    assert not watched.alive()


# ---- what is found in attributes, cells and globals ---------------------------------------------


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("buffer", torch.ones(3))
        self.plain = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.plain + self.buffer
        return out


def _attribute(name: str) -> Any:
    model = Attribute()

    def rebind() -> Watched:
        watched = Watched(getattr(model, name))
        setattr(model, name, torch.full((3,), 2.0))
        return watched

    return model, rebind


def _cell() -> Any:
    kept = torch.ones(3)

    def fn(x: Tensor) -> Tensor:
        return (x * kept).sin()

    def rebind() -> Watched:
        nonlocal kept
        watched = Watched(kept)
        kept = torch.full((3,), 2.0)
        return watched

    return fn, rebind


def _in(container: Any, *, change: bool) -> Any:
    """A tensor in a list or dictionary of a module, which is changed or exchanged."""
    model = Attribute()
    model.held = container
    key = "a" if isinstance(container, dict) else 0

    def rebind() -> Watched:
        watched = Watched(model.held[key])
        new = torch.full((3,), 2.0)
        if change:
            model.held[key] = new
        else:
            model.held = {"a": new} if key == "a" else (new,)
        return watched

    return (lambda x: model(x) * model.held[key]), rebind


def _in_a_backward() -> Any:
    """A tensor that the backward of a custom function finds, too."""
    model = Attribute()

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * model.plain

    def rebind() -> Watched:
        watched = Watched(model.plain)
        model.plain = torch.full((3,), 2.0)
        return watched

    return (lambda x: Custom.apply(x) * model.plain), rebind


FOUND: dict[str, Callable[[], Any]] = {
    "attribute": lambda: _attribute("plain"),
    "buffer": lambda: _attribute("buffer"),
    "cell": _cell,
    "in a backward": _in_a_backward,
    "list": lambda: _in([torch.ones(3)], change=True),
    "another list": lambda: _in([torch.ones(3)], change=False),
    "dictionary": lambda: _in({"a": torch.ones(3)}, change=True),
    "tuple": lambda: _in((torch.ones(3),), change=False),
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("way", ["trace", "dynamo", "torch.compile", "aot_function"])
def test_what_was_found_goes_with_its_attribute(way: str, found: str) -> None:
    fn, rebind = FOUND[found]()
    is_module = isinstance(fn, nn.Module) and way == "aot_function"
    compiled = aot_module(fn, nop) if is_module else WAYS[way](fn)
    x = leaf(2, 3)
    for _ in range(2):
        compiled(x).sum().backward()
    watched = rebind()
    assert_equal(compiled(x), fn(x))
    assert not watched.alive()


def test_another_entry_keeps_nothing_either() -> None:
    model, rebind = _attribute("plain")
    compiled = strict(model)
    x = leaf(2, 3)
    for training in (True, False, True, False):
        model.train(training)
        compiled(x)
    watched = rebind()
    model.train()
    for _ in range(2):
        compiled(x)
    assert not watched.alive()


# ---- calls that raise, or are refused -----------------------------------------------------------


def raises(x: Tensor, y: Tensor) -> Any:
    z = x * y
    raise ValueError(str(z.dtype))


def raises_in_torch(x: Tensor, y: Tensor) -> Any:
    return ((x @ y.view(2, 8)).sin(),)


def looks_at_a_value(x: Tensor, y: Tensor) -> Any:
    return (x * 2 if x.sum() > 0 else x * y,)


def writes_to_a_leaf(x: Tensor, y: Tensor) -> Any:
    return (x.mul_(y),)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in a backward")


def raises_in_backward(x: Tensor, y: Tensor) -> Any:
    return (Raises.apply(x * y),)


WRONG = {
    fn.__name__: fn
    for fn in (raises, raises_in_torch, looks_at_a_value, writes_to_a_leaf, raises_in_backward)
}
OF_DYNAMO = {"raises_in_torch", "writes_to_a_leaf", "raises_in_backward"}  # so with backend="eager"


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("way", ["soft trace", *WAYS])
def test_a_call_that_raises_or_is_refused(way: str, wrong: str) -> None:
    if way == "torch.compile" and wrong in OF_DYNAMO:
        pytest.skip("Dynamo's own frames hold each other")
    compile = WAYS.get(way, lambda fn: aheadgrad.compile(fn, frontend="trace"))
    for make in (two, lambda: (pair(0), pair(2))):
        compiled = compile(WRONG[wrong])
        for _ in range(2):
            args = make()
            watched = Watched(*args)
            with suppress(Exception):
                train(compiled(*args), args)
            del args
            assert not watched.alive(), make.__name__


FLAKY = {"raises": False}


@torch.library.custom_op("aheadgrad_lifetime::flaky", mutates_args=())
def flaky(x: Tensor) -> Tensor:
    if FLAKY["raises"]:
        raise KeyError("a kernel")
    return x.clone()


@flaky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


flaky.register_autograd(lambda ctx, grad: flaky(grad))


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("way", ["trace", "trace, any size", "dynamo", "aot_function"])
def test_a_kernel_that_raises(way: str, when: str) -> None:
    compiled = WAYS[way](lambda x, y: (flaky(x * y).sin(),))
    for _ in range(2):
        args = two()
        train(compiled(*args), args)
    args = two()
    watched = Watched(*args)
    outs = None
    try:
        FLAKY["raises"] = when == "forward"
        outs = compiled(*args)
        FLAKY["raises"] = True
        train(outs, args)
    except KeyError:
        pass
    finally:
        FLAKY["raises"] = False
    del args, outs
    assert not watched.alive()

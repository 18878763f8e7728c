"""Tensor subclasses: taken apart at the entry, put together at the exit, as in eager in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor, TwoTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import aheadgrad
from aheadgrad.testing import Inputs, assert_same
from tests.oracle.common import leaf, same, strict


class Constant(Tensor):
    """A wrapper with a number that belongs to its metadata."""

    @staticmethod
    def __new__(cls, elem: Tensor, constant: int = 4) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            requires_grad=elem.requires_grad,
            device=elem.device,
        )

    def __init__(self, elem: Tensor, constant: int = 4) -> None:
        self.elem = elem
        self.constant = constant

    def __tensor_flatten__(self) -> Any:
        return ["elem"], self.constant

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Constant(inner["elem"], meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        constant = next(a.constant for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, cls))
        inner = tree_map_only(cls, lambda t: t.elem, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        out = tree_map_only(Tensor, lambda t: cls(t, constant), out)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


def pair(*shape: int, seed: int = 0, grad: bool = True) -> Any:
    """A leaf in two parts."""
    made = TwoTensor(leaf(*shape, seed=seed, grad=False), leaf(*shape, seed=seed + 50, grad=False))
    return made.requires_grad_(grad)


def nested(*shape: int, seed: int = 0) -> Any:
    return TwoTensor(
        pair(*shape, seed=seed, grad=False), pair(*shape, seed=seed + 7, grad=False)
    ).requires_grad_()


def inputs(*tensors: Any) -> Inputs:
    return Inputs(tensors, leaves=[t for t in tensors if t.is_leaf and t.requires_grad])


def pair_and_plain() -> Inputs:
    return inputs(pair(3, 3), leaf(3, 3, seed=9))


def non_leaves() -> Inputs:
    x, y = pair(3, 3), leaf(3, 3, seed=9)
    return Inputs((x * 2, y * 2), leaves=[x, y])


# ---- shapes of subclasses ----------------------------------------------------------------------


KINDS: dict[str, Callable[[], Inputs]] = {
    "pair": lambda: inputs(pair(3, 3), pair(3, 3, seed=1)),
    "pair and plain": pair_and_plain,
    "plain and pair": lambda: inputs(leaf(3, 3), pair(3, 3)),
    "nested": lambda: inputs(nested(3, 3), nested(3, 3, seed=3)),
    "nested and pair": lambda: inputs(nested(3, 3), pair(3, 3)),
    "constant": lambda: inputs(Constant(leaf(3, 3, grad=False)).requires_grad_(), leaf(3, 3)),
    "constant of pair": lambda: inputs(Constant(pair(3, 3, grad=False)).requires_grad_(), leaf(3, 3)),
    "wrapper": lambda: inputs(WrapperSubclass(leaf(3, 3, grad=False)).requires_grad_(), leaf(3, 3)),
    "no grad": lambda: inputs(pair(3, 3, grad=False), leaf(3, 3, grad=False)),
    "history": non_leaves,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, y: (x * y).sin() + 1,
    "matmul": lambda x, y: x @ y + y.sum(),
    "several": lambda x, y: [x * 2, {"y": y.cos()}, (x + y).exp()],
    "unused": lambda x, y: x.sin(),
    "reductions": lambda x, y: ((x * y).sum(), x.mean(0)),
    "views": lambda x, y: (x.view(-1), y.t(), (x * y)[0], x),
    "created inside": lambda x, y: x * torch.ones(3, 3) + torch.arange(3),
    "detached": lambda x, y: (x.detach() * y, y.detach()),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, function: str) -> None:
    same(FUNCTIONS[function], KINDS[kind])


def test_wraps_what_it_made_of_parts() -> None:
    same(lambda x, y: TwoTensor(x.a * 2, x.b.detach() + 1), lambda: inputs(pair(3), leaf(3)))


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return TwoTensor(a.clone(), b.clone())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.a, grad.b


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any) -> Any:
        return t.a.clone(), t.b.clone()

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return TwoTensor(a, b)


def test_created_inside() -> None:
    same(lambda x, y: Wrap.apply(x, y).sin(), lambda: inputs(leaf(3), leaf(3, seed=1)))


def test_created_and_dissolved_inside() -> None:
    same(lambda x, y: Unwrap.apply(Wrap.apply(x, y).sin()), lambda: inputs(leaf(3), leaf(3, seed=1)))


def test_dissolved_inside() -> None:
    same(lambda x, y: (*Unwrap.apply(x.sin()), y * 2), pair_and_plain)


def test_parts_used_beside_the_whole() -> None:
    same(lambda x, y: (x * 2, x.a + y, (x.a * x.b).sum()), pair_and_plain)


def test_a_part_is_returned() -> None:
    same(lambda x, y: (x * 2, x.a), pair_and_plain)


def test_made_around_inputs() -> None:
    same(lambda x, y: TwoTensor(x, y), lambda: inputs(leaf(3, grad=False), leaf(3, grad=False)))


def inner_gradients() -> Inputs:
    """Tensors inside that are leaves of their own."""
    a, b = leaf(3), leaf(3, seed=1)
    x = TwoTensor(a, b)
    return Inputs((x, leaf(3, seed=2)), leaves=[x, a, b])


@pytest.mark.parametrize("function", ["arithmetic", "several", "unused"])
def test_inner_leaves(function: str) -> None:
    same(FUNCTIONS[function], inner_gradients)


def test_gradients_reach_inner_leaves() -> None:
    same(lambda x, y: (x * y, x.a * y), inner_gradients)


def inner_wrapper() -> Inputs:
    a = leaf(4)
    inner = Constant(a, 6)
    x = Constant(inner, 4)
    return Inputs((x,), leaves=[x, inner, a])


def test_gradients_reach_inner_wrappers() -> None:
    same(lambda x: x * x.elem * x.elem.elem * x.elem.constant, inner_wrapper)


def test_mixed_kinds_around_each_other() -> None:
    def f(x: Any, y: Any) -> Any:
        return TwoTensor(x.constant * x * y.a, x * y.a * y.b)

    same(f, lambda: inputs(Constant(leaf(4, grad=False), 5), pair(4, grad=False)))


def test_non_homogeneous() -> None:
    def make() -> Inputs:
        return inputs(Constant(TwoTensor(leaf(4), leaf(4, seed=1)), 6))

    same(lambda x: x.constant * x.elem * x.sin().cos(), make)


def test_complicated_inputs() -> None:
    def f(x: Any, y: Any, z: Any) -> Any:
        return x.sin().cos() + ((x + y).sum() + (x.a + y.b).sum())

    same(f, lambda: inputs(nested(4), nested(4, seed=1), leaf(4)))


# ---- metadata and types are checked --------------------------------------------------------------


def test_other_metadata_is_another_entry() -> None:
    fast = strict(lambda x: x * x.constant)
    for constant in (2, 3, 2):
        x = Constant(leaf(3, grad=False), constant)
        assert torch.equal(fast(x).elem, x.elem * constant)
    assert len(fast.entries) == 2


def test_other_types_are_other_entries() -> None:
    fast = strict(lambda x: x * 2)
    plain, whole = leaf(3, grad=False), pair(3, grad=False)
    for x in (plain, whole, Constant(plain), TwoTensor(whole, whole), plain, whole):
        assert type(fast(x)) is type(x)
    assert len(fast.entries) == 4


def test_other_parts_are_other_entries() -> None:
    fast = strict(lambda x: x + 1)
    a = leaf(4, 4, grad=False)
    for x in (TwoTensor(a, a.clone()), TwoTensor(a, a), TwoTensor(a.t(), a.clone().t())):
        assert torch.equal(fast(x).b, x.b + 1)
        assert fast(x).a.stride() == (x + 1).a.stride()


def test_a_subclass_reached_from_outside() -> None:
    scale = pair(3, grad=False)
    fast = strict(lambda x: x * scale)
    x = leaf(3)
    assert torch.equal(fast(x).b, (x * scale).b)
    scale = pair(3, seed=4, grad=False)
    assert torch.equal(fast(x).b, (x * scale).b)


def test_symbolic_sizes() -> None:
    fast = strict(lambda x, y: (x * y).sin().sum(0), dynamic=True)
    for n in (3, 4, 7):
        x, y = pair(n, 2), leaf(n, 2)
        out, expected = fast(x, y), (x * y).sin().sum(0)
        assert torch.equal(out.a, expected.a) and torch.equal(out.b, expected.b)
        got, wanted = (torch.autograd.grad(o.sum(), [x, y]) for o in (out, expected))
        assert all(torch.equal(g.b, w.b) for g, w in zip(got, wanted, strict=True))


def test_a_dispatch_mode_around_the_call() -> None:
    class Wrapping(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out if Constant in types else Constant(out, 5)

    fast = aheadgrad.compile(lambda x: x.sin().cos(), frontend="trace")
    x = pair(4)
    fast(x)
    with pytest.warns(aheadgrad.errors.FallbackWarning), Wrapping():
        out = fast(x)
    assert type(out) is Constant and type(out.elem) is TwoTensor


# ---- tangents ------------------------------------------------------------------------------------


def tangents() -> list[Any]:
    a = leaf(3, 3, seed=20, grad=False)
    return [
        a,
        a.t(),
        TwoTensor(a, a + 1),
        TwoTensor(a.t(), a.clone().t()),
        Constant(a),
        TwoTensor(TwoTensor(a, a + 1), TwoTensor(a + 2, a)),
        torch.ones(()).expand(3, 3),
    ]


@pytest.mark.parametrize("which", range(7))
@pytest.mark.parametrize("plain", [False, True])
def test_tangents_of_another_kind(plain: bool, which: int) -> None:
    """Plain for a subclass, a subclass for plain, another one, other strides: as in eager."""

    def f(x: Any, y: Any) -> Any:
        return (x * y).tanh()

    def parts(t: Any) -> Any:
        return [parts(getattr(t, n)) for n in t.__tensor_flatten__()[0]] if type(t) is not Tensor else t

    fast = strict(f)
    x, y = (leaf(3, 3) if plain else pair(3, 3)), leaf(3, 3, seed=1)
    for _ in range(2):
        got = _grads(fast, (x, y), tangents()[which])
        expected = _grads(f, (x, y), tangents()[which])
        if isinstance(expected, Exception):
            assert isinstance(got, Exception)
            return
        assert [type(g) for g in got] == [type(g) for g in expected]
        assert str(list(map(parts, got))) == str(list(map(parts, expected)))


def _grads(f: Any, given: Any, tangent: Any) -> Any:
    out = f(*given)
    try:
        return torch.autograd.grad(out, given, tangent)
    except Exception as error:
        return error


def test_one_of_several_outputs_unused() -> None:
    fast = strict(lambda x, y: (x * 2, y * 3, x * y))
    x, y = pair(3), leaf(3)
    fast(x, y)[0].sum().backward()
    assert torch.equal(x.grad.b, torch.full((3,), 2.0)) and y.grad is None


# ---- mutation and aliasing -----------------------------------------------------------------------


def _mul(x: Any, y: Any) -> Any:
    x.mul_(2)
    return x + y


def _hidden(x: Any, y: Any) -> Any:
    with torch.no_grad():
        x.mul_(2)
    return x.sin() + y


def _through_view(x: Any, y: Any) -> Any:
    x[0].add_(1)
    return x * y


def _both(x: Any, y: Any) -> Any:
    y.add_(x.a.detach())
    x.add_(y)
    return x * y


def _reshaped(x: Any, y: Any) -> Any:
    x.t_()
    return x * 2


def _reshaped_and_written(x: Any, y: Any) -> Any:
    x.t_()
    x[0].mul_(3)
    return x.view(x.shape), y


def _written_part(x: Any, y: Any) -> Any:
    x.a.add_(1)
    return x * 2


def _copied(x: Any, y: Any) -> Any:
    x.copy_(y)
    return x


MUTATIONS = [_mul, _hidden, _through_view, _both, _reshaped, _reshaped_and_written, _written_part, _copied]


@pytest.mark.parametrize("f", MUTATIONS)
def test_mutation(f: Any) -> None:
    same(f, non_leaves)


@pytest.mark.parametrize("f", MUTATIONS)
def test_mutation_without_grad(f: Any) -> None:
    same(f, lambda: inputs(pair(3, 3, grad=False), leaf(3, 3, grad=False)))


@pytest.mark.parametrize("f", MUTATIONS)
def test_mutation_of_leaves(f: Any) -> None:
    """Where eager raises, so do we."""
    fast = strict(f)
    assert_same(f, fast, pair_and_plain)


@pytest.mark.parametrize("f", [_mul, _hidden, _reshaped, _both])
def test_the_same_subclass_twice(f: Any) -> None:
    def make() -> Inputs:
        x = pair(3, 3)
        z = x * 2
        return Inputs((z, z), leaves=[x])

    same(f, make)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("f", [_mul, _hidden, _through_view])
def test_subclasses_that_share_memory(f: Any, grad: bool) -> None:
    def make() -> Inputs:
        base = pair(2, 3, 3, grad=grad)
        x = base + 1
        return Inputs((x[0], x[0]), leaves=[base], watched=[x])

    same(f, make)


def _seed_cases() -> Iterator[tuple[str, Any, Callable[[bool], Any]]]:
    """Functions of torch's own tests that it runs on subclasses."""

    def metadata(a: Any) -> Any:
        a.transpose_(1, 0)
        return a.mul(2).transpose(1, 0)

    def aliased(a: Any, b: Any) -> Any:
        a.mul_(2)
        b.t_()
        return a.mul(b)

    def strided(a: Any) -> Any:
        a.mul_(2)
        return a + 1

    yield "metadata", metadata, lambda grad: (torch.ones(1, 2, 4, requires_grad=grad).clone(),)
    yield "aliased", aliased, lambda grad: (lambda x: (x[0], x[0]))(torch.ones(2, 2, requires_grad=grad) + 1)
    yield "strided", strided, lambda grad: ((torch.ones(2, 2, requires_grad=grad) + 1)[:, 0],)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", list(_seed_cases()), ids=lambda c: c[0])
def test_what_torch_runs_or_refuses(case: Any, grad: bool) -> None:
    def make() -> Inputs:
        with TwoTensorMode():
            return Inputs(case[2](grad))

    same(case[1], make)


# ---- parameters ----------------------------------------------------------------------------------


class Int8(Tensor):
    """A weight in eight bits with a scale per row, as quantized inference has it."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, strides=data.stride())

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.int_data, self.scale = data, scale

    @staticmethod
    def of(weight: Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return Int8((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def __tensor_flatten__(self) -> Any:
        return ["int_data", "scale"], {"dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Int8(inner["int_data"], inner["scale"], meta["dtype"])

    def dense(self) -> Tensor:
        return self.int_data.to(self.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            (t,) = args
            return Int8(func(t.int_data), func(t.scale), t.dtype)
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return func(*(a.dense() if isinstance(a, Int8) else a for a in args), **(kwargs or {}))
        raise NotImplementedError(str(func))


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Int8.of(leaf(4, 3, grad=False)), requires_grad=False)
        self.bias = nn.Parameter(leaf(4, seed=3, grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias).relu()


def test_a_quantized_weight() -> None:
    model = Quantized()
    same(model, lambda: inputs(leaf(2, 3)))
    fast = strict(model)
    fast(leaf(2, 3)).sum().backward()
    assert model.bias.grad is not None and model.weight.grad is None


def test_a_subclass_as_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(pair(3, 3, grad=False))

        def forward(self, x: Tensor) -> Any:
            return nn.functional.linear(x, self.weight).relu()

    model = Model()
    fast, x = strict(model), leaf(2, 3)
    grads = []
    for run in (model, fast):
        run(x).sum().backward()
        grads.append(model.weight.grad)
        model.weight.grad = None
    assert type(grads[1]) is type(grads[0]) is TwoTensor
    assert torch.equal(grads[0].a, grads[1].a) and torch.equal(grads[0].b, grads[1].b)


# ---- real subclasses -----------------------------------------------------------------------------


def test_jagged_tensors() -> None:
    def f(n: Any, m: Any) -> Any:
        return (n * m).sin() + n

    fast = strict(f)
    for lengths in ([0, 2, 5], [0, 3, 5]):
        v, w = leaf(5, 3), leaf(5, 3, seed=1)
        offsets = torch.tensor(lengths)
        n, m = (torch.nested.nested_tensor_from_jagged(t, offsets) for t in (v, w))
        out, expected = fast(n, m), f(n, m)
        assert out.shape == expected.shape and torch.equal(out.values(), expected.values())
        got, wanted = (torch.autograd.grad(o.values().sum(), [v, w]) for o in (out, expected))
        assert all(torch.equal(g, e) for g, e in zip(got, wanted, strict=True))
        assert torch.equal((out + n).values(), (expected + n).values())
    assert len(fast.entries) == 1


def test_a_recording_leaves_nothing_of_itself_in_globals() -> None:
    from torch.nested._internal import nested_tensor

    found, nested_tensor._dummy_instance = nested_tensor._dummy_instance, None
    try:
        offsets = torch.tensor([0, 2, 5])
        v = leaf(5, 3)
        out = strict(lambda v: torch.nested.nested_tensor_from_jagged(v, offsets).sin().values())(v)
        assert torch.equal(out, v.sin())
        kept = nested_tensor._dummy_instance
        assert kept is None or type(kept._values) is Tensor
    finally:
        nested_tensor._dummy_instance = found


def test_jagged_leaves() -> None:
    fast = strict(lambda n: n.sin() * 2)
    n = torch.nested.nested_tensor([leaf(2, 3, grad=False), leaf(1, 3, grad=False)], layout=torch.jagged)
    n.requires_grad_()
    grads = []
    for run in (lambda n: n.sin() * 2, fast):
        out = run(n)
        out.backward(torch.ones_like(out.detach()))
        grads.append(n.grad.values().clone())
        n.grad = None
    assert torch.equal(*grads)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensor(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def f(x: Any, w: Any) -> Any:
        return (x @ w.t()).sin()

    fast = strict(f)
    w = distribute_tensor(leaf(4, 3, grad=False), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(leaf(2, 3, grad=False), mesh, [Replicate()]).requires_grad_()
    out, expected = fast(x, w), f(x, w)
    assert out.placements == expected.placements and torch.equal(out.to_local(), expected.to_local())
    got, wanted = (torch.autograd.grad(o.sum(), [x, w]) for o in (out, expected))
    for g, e in zip(got, wanted, strict=True):
        assert g.placements == e.placements and torch.equal(g.to_local(), e.to_local())
    other = distribute_tensor(leaf(4, 3, grad=False), mesh, [Replicate()])
    assert fast(x, other).placements == f(x, other).placements
    assert len(fast.entries) == 2


def test_dtensor_made_and_left_inside(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    def f(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()]).mul(2).to_local() * 3

    fast, x = strict(f), leaf(2, 3)
    assert torch.equal(fast(x), f(x))
    assert torch.equal(*(torch.autograd.grad(g(x).sum(), x)[0] for g in (f, fast)))


# ---- other -----------------------------------------------------------------------------------------


def test_saved_subclass_changed_before_backward() -> None:
    fast = strict(lambda x, y: x * y)
    x, y = pair(3) * 1, leaf(3)
    out = fast(x, y)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_nothing_is_kept_alive() -> None:
    fast = strict(lambda x, y: (x * y).sin())
    x, y = pair(3), leaf(3)
    fast(x, y).sum().backward()
    fast(x, y)
    watched = [weakref.ref(x), weakref.ref(x.a)]
    gc.disable()
    try:
        del x
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


def test_subclasses_that_cannot_be_taken_apart_run_uncompiled() -> None:
    class Logged(Tensor):
        @staticmethod
        def __new__(cls, t: Tensor) -> Any:
            made = Tensor._make_wrapper_subclass(cls, t.shape)
            made.inner = t
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))

    fast = aheadgrad.compile(lambda x: x * 2, frontend="trace")
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="Logged"):
        assert torch.equal(fast(Logged(torch.ones(2))), torch.full((2,), 2.0))


class TripledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (TwoTensor(grad, grad) * 3).a


def test_created_in_a_backward() -> None:
    same(lambda x: TripledBackward.apply(x).sin(), lambda: inputs(leaf(3)))


class PairBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return TwoTensor(grad, grad * 2)


def test_a_gradient_of_a_plain_input_is_a_subclass() -> None:
    fast, x = strict(lambda x: PairBackward.apply(x)), leaf(3)
    (grad,) = torch.autograd.grad(fast(x), x, torch.ones(3))
    assert type(grad) is TwoTensor and torch.equal(grad.b, torch.full((3,), 2.0))


OUTSIDE = [leaf(3, seed=30, grad=False), leaf(3, seed=31, grad=False)]


def _all_from_outside(x: Any) -> Any:
    return x * TwoTensor(*OUTSIDE)


def _some_from_outside(x: Any) -> Any:
    return x * TwoTensor(x.detach(), OUTSIDE[0])


@pytest.mark.parametrize("f", [_all_from_outside, _some_from_outside])
def test_made_of_tensors_from_outside(f: Any) -> None:
    fast, x = aheadgrad.compile(f, frontend="trace"), leaf(3)
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="from outside"):
        assert torch.equal(fast(x).b, f(x).b)


def _part_given_too(x: Tensor) -> Any:
    return TwoTensor(x, x.clone()), x


def _overlapping_parts(x: Tensor) -> Any:
    return TwoTensor(x[:3], x[1:4].as_strided((3,), (1,), 0)), leaf(3, grad=False)


@pytest.mark.parametrize("make", [_part_given_too, _overlapping_parts])
def test_parts_that_share_memory(make: Any) -> None:
    """Merged as wholes or not at all: what else is changed runs uncompiled."""

    def f(x: Any, y: Tensor) -> Any:
        x.mul_(2)
        return x + y[:3]

    def fresh() -> Inputs:
        return Inputs(make(leaf(5, grad=False)[:3] if make is _part_given_too else leaf(5, grad=False)))

    fast = aheadgrad.compile(f, frontend="trace")
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="share memory"):
        fast(*fresh().args)
    assert_same(f, fast, fresh)


def test_one_part_in_both_places() -> None:
    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        return x * y

    def make() -> Inputs:
        a = leaf(3, grad=False)
        return Inputs((TwoTensor(a, a), leaf(3, grad=False)))

    same(f, make)


def test_backends_get_plain_graphs() -> None:
    seen: list[Any] = []

    def compiler(graph: Any, example: Any) -> Any:
        seen.append([type(e) for e in example])
        return graph.forward

    from aheadgrad.compat import aot_function

    fast = aot_function(lambda x, y: x * y, compiler)
    x, y = pair(3), leaf(3)
    fast(x, y).sum().backward()
    assert type(x.grad) is TwoTensor and len(seen) == 2 and len(seen[0]) == 3


def test_through_torch_compile() -> None:
    def f(x: Any, y: Any) -> Any:
        return (x * y).sin()

    fast = torch.compile(f, backend="aheadgrad")
    x, y = pair(3), leaf(3)
    out, expected = fast(x, y), f(x, y)
    assert torch.equal(out.b, expected.b)
    grads = [torch.autograd.grad(o.sum(), [x, y]) for o in (out, expected)]
    assert all(torch.equal(a.b, b.b) for a, b in zip(*grads, strict=True))


def test_a_detached_part_of_another_input_does_not_own_its_memory() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        b.transpose(0, -1).mul_(1.5)
        return b

    def make() -> Inputs:
        x = pair(2, 2, 3, grad=False)
        return Inputs((x[:-1].detach(), x), leaves=[])

    same(f, make)


def test_several_outputs_of_a_subclass_that_changed_its_shape() -> None:
    def f(x: Tensor) -> Any:
        whole = x.clone()
        view = whole.view(3, 1, 2)
        view.unsqueeze_(0)
        return view, whole

    same(f, lambda: inputs(pair(3, 2)))


def test_a_view_that_changed_its_shape_and_is_not_used_again() -> None:
    def f(x: Tensor) -> Tensor:
        part = x[:, 1:]
        part.t_()
        out = part * 2
        x[0] = 3.0
        return out

    def make() -> Inputs:
        x = pair(2, 3)
        return Inputs((x * 1,), leaves=[x])

    same(f, make)


def test_a_subclass_that_changes_its_shape_and_comes_to_require_grad() -> None:
    def fn(a: Tensor) -> Tensor:
        a.t_()
        a.requires_grad_()
        return a.sin()

    same(fn, lambda: Inputs((pair(2, 3, grad=False),)))

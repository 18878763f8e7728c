"""Ways to call and to return."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import aheadgrad
from aheadgrad.testing import Inputs, assert_same

from .common import assert_equal, default, leaf, leaves, one, same, strict, two, uncompiled


class Point(NamedTuple):
    x: Tensor
    y: Tensor


Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    tokens: Tensor
    weight: float
    mask: Tensor | None = None


pytree.register_dataclass(Batch)


# arguments


def test_keyword_arguments() -> None:
    def fn(x: Tensor, *, scale: float, y: Tensor) -> Tensor:
        return x * scale + y

    def make() -> Inputs:
        x, y = leaf(2, 3, seed=1), leaf(2, 3, seed=2)
        return Inputs((x,), {"scale": 2.0, "y": y}, leaves=[x, y])

    same(fn, make)


def test_keywords_in_another_order_are_the_same_call() -> None:
    compiled = strict(lambda a, b: a - b)
    x, y = leaf(2, seed=1), leaf(2, seed=2)
    assert torch.equal(compiled(a=x, b=y), x - y)
    assert torch.equal(compiled(b=y, a=x), x - y)
    assert torch.equal(compiled(b=x, a=y), y - x)


def test_positional_or_keyword() -> None:
    compiled = strict(lambda a, b: a - 2 * b)
    x, y = leaf(2, seed=1), leaf(2, seed=2)
    for out in (compiled(x, y), compiled(x, b=y), compiled(b=y, a=x)):
        assert torch.equal(out, x - 2 * y)


@pytest.mark.parametrize(
    "wrap, unwrap",
    [
        (lambda x, y: [x, y], lambda v: v[0] * 2 + v[1]),
        (lambda x, y: (x, (y,)), lambda v: v[0] * 2 + v[1][0]),
        (lambda x, y: {"b": x, "a": y}, lambda v: v["b"] * 2 + v["a"]),
        (lambda x, y: {3: x, "a": [y]}, lambda v: v[3] * 2 + v["a"][0]),
        (lambda x, y: OrderedDict(b=x, a=y), lambda v: v["b"] * 2 + v["a"]),
        (lambda x, y: Point(x, y), lambda v: v.x * 2 + v.y),
        (lambda x, y: Pair(x, {"k": y}), lambda v: v.left * 2 + v.right["k"]),
        (lambda x, y: Batch(x, 2.0, y), lambda v: v.tokens * v.weight + v.mask),
        (lambda x, y: [None, x, "name", y, True, 3], lambda v: v[1] * 2 + v[3] if v[4] else v[1]),
    ],
)
def test_nested_arguments(wrap: Callable[..., Any], unwrap: Callable[[Any], Tensor]) -> None:
    def make() -> Inputs:
        x, y = leaf(2, 3, seed=1), leaf(2, 3, seed=2)
        return Inputs((wrap(x, y),), leaves=[x, y])

    compiled = same(unwrap, make)
    x = leaf(2, 3, seed=1)
    assert torch.equal(compiled(wrap(x, x)), unwrap(wrap(x, x)))  # the same tensor twice


@pytest.mark.parametrize("empty", [[], (), {}, None])
def test_empty_structures(empty: Any) -> None:
    def fn(x: Tensor, rest: Any) -> Tensor:
        return x * 2 + (0 if rest is None else len(rest))

    same(fn, lambda: Inputs((x := leaf(2), empty), leaves=[x]))


def test_none_and_a_tensor_in_the_same_place() -> None:
    def fn(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * 2 if mask is None else x * mask

    compiled = strict(fn)
    x, m = leaf(3), torch.tensor([1.0, 0.0, 1.0])
    for args in ((x,), (x, None), (x, m), (x,), (x, m)):
        assert torch.equal(compiled(*args), fn(*args))


def test_strings_choose_the_way() -> None:
    def fn(x: Tensor, how: str) -> Tensor:
        return getattr(x, how)()

    compiled = strict(fn)
    x = leaf(3)
    for how in ("sin", "cos", "sin", "exp"):
        assert torch.equal(compiled(x, how), fn(x, how))


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, -0.0, float("inf"), float("nan"), 2 + 1j, 2**62, torch.float64, torch.device("cpu")],
)
def test_constants_as_arguments(value: Any) -> None:
    def fn(x: Tensor, v: Any) -> Any:
        return (x * v if isinstance(v, (int, float, complex)) else x.to(v)), v

    compiled = strict(fn)
    x = leaf(3)
    for _ in range(2):
        expected, found = fn(x, value), compiled(x, value)
        assert_equal(expected[0], found[0])
        assert type(found[1]) is type(value)
        assert repr(found[1]) == repr(value)
    assert len(compiled.entries) == 1


def test_arguments_of_any_type() -> None:
    class Config:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    def fn(x: Tensor, config: Config, act: Callable[[Tensor], Tensor]) -> Tensor:
        return act(x) * config.scale

    compiled = strict(fn)
    x = leaf(3)
    for config, act in ((Config(2.0), torch.sin), (Config(3.0), torch.sin), (Config(3.0), torch.cos)):
        assert torch.equal(compiled(x, config, act), fn(x, config, act))


def test_slices_and_sets_as_arguments() -> None:
    def fn(x: Tensor, where: slice, names: frozenset[str]) -> Tensor:
        return x[where] * len(names)

    compiled = strict(fn)
    x = leaf(5)
    for where in (slice(1, 3), slice(0, 4), slice(1, 3)):
        assert torch.equal(compiled(x, where, frozenset("ab")), fn(x, where, frozenset("ab")))


def test_an_ignored_argument() -> None:
    same(lambda x, _unused: x * 2, two(2, 3))


def test_an_ignored_argument_of_another_shape_next_time() -> None:
    compiled = strict(lambda x, _unused: x * 2)
    x = leaf(3)
    for other in (leaf(2), leaf(4), torch.ones(2, dtype=torch.int64)):
        assert torch.equal(compiled(x, other), x * 2)


def test_no_arguments() -> None:
    same(lambda: torch.ones(2) * 3, Inputs)


def test_no_tensor_arguments() -> None:
    same(lambda n: torch.arange(n) * 2.0, lambda: Inputs((4,)))


def test_default_arguments() -> None:
    def fn(x: Tensor, scale: float = 3.0, *, shift: int = 1) -> Tensor:
        return x * scale + shift

    compiled = strict(fn)
    x = leaf(3)
    for args, kwargs in (
        ((x,), {}),
        ((x, 2.0), {}),
        ((x,), {"shift": 4}),
        ((x, 2.0), {"shift": 4}),
        ((x,), {}),
    ):
        assert torch.equal(compiled(*args, **kwargs), fn(*args, **kwargs))


_DEFAULT = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def test_a_tensor_as_default_argument() -> None:
    def fn(x: Tensor, w: Tensor = _DEFAULT) -> Tensor:
        return x * w

    compiled = strict(fn)
    x = leaf(3)
    _DEFAULT.grad = None
    compiled(x).sum().backward()
    assert torch.equal(_DEFAULT.grad, x)  # type: ignore[arg-type]
    assert torch.equal(compiled(x, x), x * x)


def test_variable_arguments() -> None:
    def fn(*xs: Tensor, **named: Tensor) -> Tensor:
        return sum(xs) + sum(v * i for i, v in enumerate(named.values(), 1))  # type: ignore[return-value]

    compiled = strict(fn)
    a, b, c = (leaf(3, seed=i) for i in range(3))
    for args, kwargs in (
        ((a,), {}),
        ((a, b), {}),
        ((a, b), {"k": c}),
        ((a,), {"k": c, "l": b}),
        ((a,), {"l": c, "k": b}),
    ):
        assert torch.equal(torch.as_tensor(compiled(*args, **kwargs)), torch.as_tensor(fn(*args, **kwargs)))


def test_keyword_names_that_are_words_of_python() -> None:
    def fn(x: Tensor, **named: Tensor) -> Tensor:
        return x * named["class"] + named["not a name"]

    a, b, c = (leaf(3, seed=i) for i in range(3))
    compiled = strict(fn)
    for _ in range(2):
        assert torch.equal(compiled(a, **{"class": b, "not a name": c}), a * b + c)


# kinds of callables


class Affine:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.w = leaf(3)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale + self.w

    def method(self, x: Tensor) -> Tensor:
        return x * self.scale - self.w

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * 5

    @staticmethod
    def of_none(x: Tensor) -> Tensor:
        return x * 6


@pytest.mark.parametrize(
    "make",
    [
        lambda: Affine(2.0),
        lambda: Affine(2.0).method,
        lambda: Affine.of_class,
        lambda: Affine.of_none,
        lambda: functools.partial(lambda s, x: x * s, 3),
        lambda: functools.partial(torch.add, alpha=2, other=leaf(3, seed=4)),
        lambda: functools.lru_cache(lambda x: x * 2).__wrapped__,
        lambda: torch.sin,
        lambda: Tensor.sin,
        lambda: torch.nn.functional.gelu,
    ],
)
def test_kinds_of_callables(make: Callable[[], Any]) -> None:
    same(make(), one(3))


def test_as_decorators() -> None:
    @aheadgrad.compile(frontend="trace")
    def plain(x: Tensor) -> Tensor:
        """Doubles."""
        return x * 2

    @aheadgrad.compile(fallback="error", frontend="trace")
    def with_options(x: Tensor) -> Tensor:
        return x * 3

    x = leaf(3)
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Doubles."
    assert torch.equal(plain(x), x * 2)
    assert torch.equal(with_options(x), x * 3)


def test_decorating_methods() -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.w = torch.full((3,), scale, requires_grad=True)

        @aheadgrad.compile(fallback="error")
        def run(self, x: Tensor) -> Tensor:
            return x * self.w

        @property
        @aheadgrad.compile
        def double(self) -> Tensor:
            return self.w * 2

    first, second = Model(2.0), Model(3.0)
    x = leaf(3)
    for _ in range(2):
        assert torch.equal(first.run(x), x * 2)
        assert torch.equal(second.run(x), x * 3)
        assert torch.equal(Model.run(first, x), x * 2)
        assert torch.equal(second.double, second.w * 2)
    second.run(x).sum().backward()
    assert first.w.grad is None
    assert torch.equal(second.w.grad, x)  # type: ignore[arg-type]
    second.w = torch.full((3,), 7.0, requires_grad=True)
    assert torch.equal(second.run(x), x * 7)


def test_compiled_twice_is_compiled_once() -> None:
    compiled = strict(lambda x: x * 2)
    assert aheadgrad.compile(compiled, frontend="trace") is compiled


def test_compiled_inside_compiled() -> None:
    inner = strict(lambda x: x.sin() * 2)

    def outer(x: Tensor) -> Tensor:
        return inner(x) + inner(x * 2)

    def eager(x: Tensor) -> Tensor:
        return x.sin() * 2 + (x * 2).sin() * 2

    assert_same(eager, strict(outer), one(3))


def test_a_recursive_function() -> None:
    @aheadgrad.compile(fallback="error", frontend="trace")
    def power(x: Tensor, n: int) -> Tensor:
        return x if n == 1 else x * power(x, n - 1)

    x = leaf(3)
    torch.testing.assert_close(power(x, 4), x**4)
    torch.testing.assert_close(power(x, 3), x**3)


# what comes back


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: None,
        lambda x: 3,
        lambda x: "text",
        lambda x: (),
        lambda x: [],
        lambda x: {},
        lambda x: x.shape,
        lambda x: x.size(0),
        lambda x: (x.shape, x * 2),
        lambda x: [x.stride(), x.dtype, x.device, x * 2],
        lambda x: torch.Size([1, 2]),
        lambda x: torch.ones(2),
        lambda x: (x * 2, torch.zeros(3), 1.5),
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: torch.tensor(3),
        lambda x: x,
        lambda x: (x, x),
        lambda x: (lambda y: (y, y))(x * 2),
        lambda x: (lambda y: [y, {"again": y}, (y, None)])(x * 2),
        lambda x: {"b": x * 2, "a": [x.sin(), (x.cos(), None, 1)]},
        lambda x: {2: x * 2, 1: x * 3},
        lambda x: {("a", 1): x * 2},
        lambda x: OrderedDict([("z", x * 2), ("a", x * 3)]),
        lambda x: Point(x * 2, x * 3),
        lambda x: Pair(x * 2, Pair(x * 3, None)),
        lambda x: Batch(x * 2, 1.0, x * 3),
        lambda x: Batch(x * 2, 1.0),
        lambda x: x.max(0),
        lambda x: torch.linalg.svd(x),
        lambda x: x.detach(),
        lambda x: (x * 2).detach(),
        lambda x: (x > 0, x.argmax(), x * 2),
        lambda x: x.unbind(0),
        lambda x: frozenset([1, 2]),
        lambda x: slice(1, 2),
        lambda x: iter([1]).__next__(),
        lambda x: x.requires_grad,
        lambda x: x.new_empty(0),
        lambda x: [x * 2] * 3,
    ],
)
def test_returns(fn: Callable[[Tensor], Any]) -> None:
    same(fn, one(3, 3))


def test_returns_a_fresh_structure_each_time() -> None:
    compiled = strict(lambda x: [x * 2, {"k": [1]}])
    x = leaf(3)
    first = compiled(x)
    first.append("mine")
    first[1]["k"].append("mine")
    second = compiled(x)
    assert len(second) == 2
    assert second[1] == {"k": [1]}


def test_returns_a_fresh_constant_each_time() -> None:
    """`torch.tensor([...])` is made anew in each call of eager's."""
    compiled = strict(lambda x: (x * 2, torch.tensor([1.0, 2.0]), torch.ones(2)))
    x = leaf(3)
    for made in compiled(x)[1:]:
        made.zero_()
    _, a, b = compiled(x)
    assert torch.equal(a, torch.tensor([1.0, 2.0]))
    assert torch.equal(b, torch.ones(2))


def test_nothing_is_returned() -> None:
    def fn(x: Tensor) -> None:
        x.mul_(2)

    same(fn, one(3, grad=False))


def test_returns_an_argument_that_is_no_tensor() -> None:
    box = object()
    compiled = strict(lambda x, b: (x * 2, b))
    x = leaf(3)
    assert compiled(x, box)[1] is box
    other = object()
    assert compiled(x, other)[1] is other


def test_returns_the_list_it_was_given() -> None:
    def fn(xs: list[Tensor]) -> list[Tensor]:
        return xs

    xs = [leaf(2), leaf(3)]
    compiled = aheadgrad.compile(fn)
    assert compiled(xs) is xs
    assert compiled(xs) is xs
    uncompiled(fn, lambda: Inputs(([leaf(2), leaf(3)],)), "returns a list that it was given")


def test_a_list_argument_that_is_appended_to() -> None:
    """Eager changes the caller's list."""

    def fn(xs: list[Tensor]) -> Tensor:
        xs.append(xs[0] * 2)
        return xs[-1] + 1

    compiled = default(fn)
    for _ in range(2):
        eager, ours = [leaf(2)], [leaf(2)]
        assert torch.equal(fn(eager), compiled(ours))
        assert len(ours) == len(eager) == 2
        assert torch.equal(ours[1], eager[1])
        ours[1].sum().backward()
        assert ours[0].grad is not None


def test_a_dictionary_that_is_written_to() -> None:
    """A cache that is passed along."""

    def fn(x: Tensor, cache: dict[str, Any]) -> Tensor:
        past = cache["layers"][0].get("k")
        cache["layers"][0]["k"] = x if past is None else torch.cat([past, x])
        cache["length"] = cache["layers"][0]["k"].shape[0]
        return cache["layers"][0]["k"].sum(0)

    compiled = default(fn)
    eager: dict[str, Any] = {"layers": [{}], "length": 0}
    ours: dict[str, Any] = {"layers": [{}], "length": 0}
    for i in range(3):
        x = leaf(1, 2, seed=i)
        assert torch.equal(fn(x, eager), compiled(x, cache=ours) if i == 1 else compiled(x, ours))
        assert list(ours) == list(eager)
        assert ours["length"] == eager["length"] == i + 1
        assert torch.equal(ours["layers"][0]["k"], eager["layers"][0]["k"])


# kinds of tensors


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (1, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    same(lambda x: (x * 2 + 1, x.sum(), x.reshape(-1)), lambda: leaves(leaf(*shape)))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_dtypes_with_gradients(dtype: torch.dtype) -> None:
    same(lambda x: (x * x + 1, (x * 2).sum(), x.t()), one(2, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool])
def test_dtypes_without_gradients(dtype: torch.dtype) -> None:
    same(lambda x: (x & x, x.sum(), x.to(torch.float32) / 2, x.t()), one(2, 3, dtype=dtype, grad=False))


def test_complex_parts() -> None:
    def fn(z: Tensor) -> Any:
        return z.real * 2, z.imag.sin(), z.conj() * z, z.abs(), torch.view_as_real(z)

    same(fn, one(2, 3, dtype=torch.complex64))


def test_conjugated_and_negated_arguments() -> None:
    def make() -> Inputs:
        z = leaf(3, dtype=torch.complex64)
        return Inputs((z.conj(), z.conj().imag), leaves=[z], watched=[z])

    same(lambda c, n: (c * 2, n * 3), make)


def test_mixed_dtypes() -> None:
    def make() -> Inputs:
        x, y = leaf(3, dtype=torch.float16), leaf(3, dtype=torch.float64)
        return Inputs((x, y, torch.tensor([0, 1, 2])), leaves=[x, y])

    same(lambda x, y, i: (x * y, x[i] + i, y.float() * x), make)


def test_a_sparse_argument_runs_uncompiled_and_says_so() -> None:
    def fn(s: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(s, x)

    s, x = torch.eye(3).to_sparse(), leaf(3, 2)
    compiled = aheadgrad.compile(fn, frontend="trace")
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="s is"):
        assert torch.equal(compiled(s, x), fn(s, x))


def test_meta_tensors() -> None:
    compiled = strict(lambda x: x @ x.t())
    out = compiled(torch.empty(2, 3, device="meta"))
    assert out.device.type == "meta"
    assert out.shape == (2, 2)


def test_a_parameter_as_argument() -> None:
    def make() -> Inputs:
        p = torch.nn.Parameter(leaf(3).detach())
        return Inputs((p,), leaves=[p])

    same(lambda p: (p * 2, p), make)


def test_wrong_number_of_arguments() -> None:
    compiled = strict(lambda x: x * 2)
    with pytest.raises(TypeError, match="positional argument"):
        compiled()
    with pytest.raises(TypeError):
        compiled(leaf(2), leaf(2))
    with pytest.raises(TypeError):
        compiled(leaf(2), y=1)

"""What an entry assumes of a call: with any of it changed, the answer is eager's. One test per assumption."""

from __future__ import annotations

import collections
import enum
import functools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import FallbackError, FallbackWarning

from .common import agree, assert_equal, leaf, strict


def through(
    fn: Callable[..., Any], *calls: tuple[Any, ...], entries: int | None = None, **options: Any
) -> Any:
    """Each call twice over, in one compiled callable."""
    compiled = strict(fn, max_entries=64, **options)
    for args in calls * 2:
        agree(fn, compiled, *args)
    if entries is not None:
        assert len(compiled.entries) == entries
    return compiled


# arguments that are no tensors


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Pair(NamedTuple):
    a: Any
    b: Any


class OtherPair(NamedTuple):
    a: Any
    b: Any


class Text(str):
    pass


class Nasty:
    """Equal to everything, true of nothing."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


@dataclass
class Config:
    scale: float = 2.0
    names: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    table: dict[Any, Any] = field(default_factory=dict)
    other: int = 0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Keyed:
    def __init__(self, **data: Any) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __len__(self) -> int:
        return len(self._data)


VALUES: list[list[Any]] = [
    [1, True, 1.0, 1 + 0j, np.int64(1), np.float32(1), Level.LOW, 2],
    [0.0, -0.0, 0, False, complex(0, -0.0), complex(0, 0.0), math.nan, math.inf, -math.inf],
    [None, 3],
    ["a", "b", Text("a"), b"a", bytearray(b"a")],
    [slice(0, 2), slice(0, 3), slice(None), slice(0, 2, 2), slice(False, 2)],
    [range(2), range(3), range(0, 4, 2)],
    [Colour.RED, Colour.BLUE],
    [{1, 2}, {1, 3}, {1.0, 2}, frozenset({1, 2}), set()],
    [(1, 2), [1, 2], Pair(1, 2), OtherPair(1, 2), (1, 2, 3), (1, (2,)), collections.deque([1, 2])],
    [{"a": 1}, {"b": 1}, {"a": 2}, collections.OrderedDict(a=1), {"a": 1, "b": 2}, {"b": 2, "a": 1}, {}],
    [torch.float32, torch.float64, torch.device("cpu"), torch.device("meta"), torch.contiguous_format],
    [torch.Size([2]), torch.Size([3]), (2,)],
    [np.ones(2), np.ones(3), np.zeros(2), np.ones(2, dtype=np.float32), np.ones((2, 2)).T],
    [math.sin, math.cos, functools.partial(math.pow, 2), len],
    [Config(), Config(3.0), Slotted(1.0), Slotted(2.0), Nasty(1.0), Nasty(2.0)],
    [int, float, Config],
    [..., NotImplemented],
    [{(1, 2): 3}, {(1, 2): 4}, {None: 3}],
    [[[]], [[], []], [{}], [()]],
]


def shown(value: Any) -> str:
    """Everything about a value that a function could see."""
    if isinstance(value, Nasty | Slotted | Config):
        return f"{type(value)} {getattr(value, 'factor', None)} {getattr(value, 'scale', None)}"
    return f"{type(value)} {value!r}"


@pytest.mark.parametrize("values", VALUES, ids=lambda v: type(v[0]).__name__)
def test_other_values(values: list[Any]) -> None:
    def fn(x: Tensor, value: Any) -> Tensor:
        assert type(value) is not None  # a function that asks for types gets numbers, not symbols
        return x * (sum(map(ord, shown(value))) % 1009)

    through(fn, *((leaf(3, grad=False), v) for v in values))


@pytest.mark.parametrize("values", VALUES, ids=lambda v: type(v[0]).__name__)
def test_other_values_inside_others_and_closed_over(values: list[Any]) -> None:
    value: Any = None

    def fn(x: Tensor, box: Any) -> Tensor:
        return x * (sum(map(ord, shown(box["v"][0]) + shown(value))) % 1009)

    compiled = strict(fn, max_entries=64)
    first, *others = values[:3]
    for given, held in ((first, first), *((v, first) for v in others), *((first, v) for v in others)):
        for _ in range(2):
            value = held
            agree(fn, compiled, leaf(3, grad=False), {"v": [given]})


def test_nan_hits_and_other_floats_do_not() -> None:
    compiled = through(lambda x, n: x * n, (leaf(2), math.nan), (leaf(2), float("nan")), entries=1)
    assert len(compiled.misses) == 0


class Names(list[Any]):
    pass


MUTATIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "array": (lambda: np.ones(3), lambda c: c.__iadd__(1), lambda c: float(c.sum())),
    "array in a list": (lambda: [np.ones(3)], lambda c: c[0].__iadd__(1), lambda c: float(c[0].sum())),
    "bytes": (lambda: bytearray(b"a"), lambda c: c.append(1), len),
    "queue": (collections.deque, lambda c: c.append(1), len),
    "set": (set, lambda c: c.add(len(c)), len),
    "nested list": (lambda: [[1], [2]], lambda c: c[1].append(3), lambda c: sum(map(len, c))),
    "long list": (lambda: [0] * 1000, lambda c: c.__setitem__(999, c[999] + 1), sum),
    "table with odd keys": (lambda: {None: 1}, lambda c: c.update({None: c[None] + 1}), lambda c: c[None]),
    "order of a table": (
        lambda: {"a": 1, "b": 2},
        lambda c: c.update({k: c.pop(k) for k in list(c)[:1]}),
        lambda c: next(iter(c.values())),
    ),
    "list subclass": (lambda: Names([1, 2]), lambda v: v.append(3), sum),
    "item of a list subclass": (lambda: Names([1, 2]), lambda v: v.__setitem__(0, v[0] + 1), sum),
    "counter": (lambda: collections.Counter(n=1), lambda v: v.update(n=1), lambda v: v["n"]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_contents_that_are_changed_between_calls(name: str) -> None:
    make, change, read = MUTATIONS[name]
    value = make()

    def given(x: Tensor, value: Any) -> Tensor:
        return x * read(value)

    def closed_over(x: Tensor) -> Tensor:
        return x * read(value)

    first, second = strict(given, max_entries=64), strict(closed_over, max_entries=64)
    for _ in range(3):
        for _ in range(2):
            agree(given, first, leaf(3, grad=False), value)
            agree(closed_over, second, leaf(3, grad=False))
        change(value)


def test_a_large_array_is_refused_by_name() -> None:
    data = np.ones(100_000)

    def given(x: Tensor, data: Any) -> Tensor:
        return x * float(data[0])

    def closed_over(x: Tensor) -> Tensor:
        return x * float(data[0])

    for fn, args in ((given, (leaf(3), data)), (closed_over, (leaf(3),))):
        with pytest.raises(FallbackError, match="data is a numpy array that is too large"):
            strict(fn)(*args)
        compiled = aheadgrad.compile(fn, frontend="trace")
        with pytest.warns(FallbackWarning, match="too large"):
            agree(fn, compiled, *args)
        data += 1
        agree(fn, compiled, *args)
    agree(given, compiled := strict(given), leaf(3), np.ones(2))
    assert len(compiled.entries) == 1


def test_an_array_that_shares_memory_with_what_the_entry_keeps() -> None:
    def fn(x: Tensor, data: Any) -> Tensor:
        return x * torch.from_numpy(data)

    first, second = np.ones(3, dtype=np.float32), np.ones(3, dtype=np.float32)
    compiled = aheadgrad.compile(fn, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        agree(fn, compiled, leaf(3), first)
        first += 1
        agree(fn, compiled, leaf(3), second)
        agree(fn, compiled, leaf(3), first)


def test_generators() -> None:
    def fn(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.rand(3, generator=generator)

    compiled = strict(fn)
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    mine, yours = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    x = leaf(3)
    for a, b in ((one, mine), (two, yours), (one, mine), (two, yours)):
        assert_equal(fn(x, a), compiled(x, b))


def test_functions_given_as_arguments() -> None:
    through(lambda x, f: f(x), (leaf(3), torch.sin), (leaf(3), torch.cos), (leaf(3), lambda t: t * 2))


def test_keyword_arguments_in_another_order() -> None:
    def fn(x: Tensor, **rest: Any) -> Tensor:
        return x * sum(i * v for i, v in enumerate(rest.values(), 1))

    compiled = strict(fn)
    x = leaf(3)
    for rest in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}, {"a": 1}):
        assert_equal(compiled(x, **rest), fn(x, **rest))


# tensors


def test_grad_is_required_where_grad_mode_is_off() -> None:
    def asks(x: Tensor) -> Tensor:
        return x * 2 if x.requires_grad else x * 3

    def turns_on(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    for fn in (asks, turns_on):
        compiled = strict(fn)
        for mode in (torch.no_grad, nullcontext):
            for x in (leaf(3), leaf(3, grad=False), leaf(3), leaf(3, grad=False)):
                with mode():
                    found, expected = compiled(x), fn(x)
                assert_equal(found, expected)
                assert found.requires_grad == expected.requires_grad


def test_leaves_where_the_function_asks() -> None:
    for fn in (lambda x: x + 2 if x.is_leaf else x + 3, lambda x: x + 2 if x.grad_fn is None else x + 3):
        compiled = strict(fn)
        for make in (lambda: leaf(3), lambda: leaf(3) * 1, lambda: leaf(3, grad=False)) * 2:
            assert_equal(compiled(make()), fn(make()))


def test_leaves_where_they_are_written_to() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    compiled = strict(fn)
    for make in (lambda: leaf(3) * 1, lambda: leaf(3, grad=False), lambda: leaf(3), lambda: leaf(3) * 1):
        outcomes = []
        for run in (fn, compiled):
            x = make()
            try:
                out = run(x)
                outcomes.append((x.detach(), out.detach(), x.is_leaf, out.requires_grad))
            except RuntimeError:
                outcomes.append("raises")
        assert_equal(outcomes[0], outcomes[1])


def test_detached_inside_a_leaf_and_a_view() -> None:
    def fn(x: Tensor) -> Tensor:
        x.detach_()
        return x * 2

    compiled = strict(fn)
    for make in (
        lambda: leaf(3) * 1,
        lambda: leaf(3),
        lambda: (leaf(4) * 1)[:3],
        lambda: leaf(3, grad=False),
    ):
        outcomes = []
        for run in (fn, compiled):
            x = make()
            try:
                outcomes.append((run(x), x.requires_grad, x.is_leaf))
            except RuntimeError:
                outcomes.append("raises")
        assert_equal(outcomes[0], outcomes[1])


def test_conjugates_and_negatives() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    through(lambda t: t * 2, (z,), (z.conj(),), (z.conj().imag,), (z.imag,))


def test_parameters_and_buffers_as_arguments() -> None:
    through(lambda t: t * 2, (torch.ones(3),), (nn.Parameter(torch.ones(3)),), (nn.Buffer(torch.ones(3)),))


def test_layouts() -> None:
    compiled = aheadgrad.compile(lambda x: x * 2, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (torch.eye(3), torch.eye(3).to_sparse(), torch.eye(3), torch.eye(3).to_sparse_csr()):
            assert torch.equal(compiled(x).to_dense(), (x * 2).to_dense())


def test_two_names_for_one_closed_over_tensor() -> None:
    first = second = leaf(3, seed=1)

    def fn(x: Tensor) -> Tensor:
        return x * first + second

    compiled = strict(fn)
    agree(fn, compiled, leaf(3))
    second = leaf(3, seed=2)
    agree(fn, compiled, leaf(3))
    first = second
    agree(fn, compiled, leaf(3))
    first = leaf(3, seed=3)
    agree(fn, compiled, leaf(3))


def test_iterators_run_uncompiled() -> None:
    def fn(x: Tensor, numbers: Any) -> Tensor:
        return x * next(numbers)

    numbers = iter([1, 2])
    for run, args in ((fn, (leaf(3), numbers)), (lambda x: x * next(numbers), (leaf(3),))):
        with pytest.raises(FallbackError, match="numbers is an iterator"):
            strict(run)(*args)
    assert list(numbers) == [1, 2]
    compiled = aheadgrad.compile(fn, frontend="trace")
    mine, theirs = iter([1, 2, 3]), iter([1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(3):
            assert_equal(compiled(leaf(3), mine), fn(leaf(3), theirs))

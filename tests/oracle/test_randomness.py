"""The same seed gives the same numbers, and each call new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aheadgrad.testing import Inputs

from .common import assert_equal, default, leaf, one, same, same_by_default, same_module, strict, uncompiled

RANDOM: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: x * torch.rand(3, 4),
    "randn": lambda x: x + torch.randn(3, 4),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x * torch.randint(0, 5, (3, 4)),
    "randperm": lambda x: x[torch.randperm(3)],
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x * torch.empty(3, 4).bernoulli_(0.3),
    "normal_": lambda x: x + torch.empty(3, 4).normal_(),
    "uniform_": lambda x: x + torch.empty(3, 4).uniform_(-1, 1),
    "exponential_": lambda x: x + torch.empty(3, 4).exponential_(),
    "torch.normal": lambda x: torch.normal(x, 2.0),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(4), 2)],
    "poisson": lambda x: x * torch.poisson(torch.ones(3, 4)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.5).sin(), 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "dropout off": lambda x: F.dropout(x, 0.5, training=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_dropout": lambda x: F.dropout1d(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "gumbel hard": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "unused": lambda x: (torch.rand(5), x * 2)[1],
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "manual_seed inside": lambda x: (torch.manual_seed(5), x * torch.rand(3, 4))[1],
}
SET_INSIDE = ("manual_seed inside",)  # no program of tensor operations does that; Dynamo breaks the graph


@pytest.mark.parametrize("name", RANDOM)
def test_the_same_numbers(name: str) -> None:
    compare = same_by_default if name in SET_INSIDE else same
    compare(RANDOM[name], one(3, 4))


@pytest.mark.parametrize(
    "name", [n for n in RANDOM if n not in ("dropout of all", "dropout of none", "dropout off")]
)
def test_new_numbers_and_the_same_sequence(name: str) -> None:
    fn = RANDOM[name]
    compiled = (default if name in SET_INSIDE else strict)(fn)
    results = []
    for run in (fn, compiled, compiled):
        torch.manual_seed(7)
        results.append([run(leaf(3, 4)) for _ in range(3)] + [torch.get_rng_state()])
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dropout_of_other_dtypes(dtype: torch.dtype) -> None:
    same(lambda x: F.dropout(x, 0.5), one(3, 4, dtype=dtype))


def test_dropout_of_other_layouts() -> None:
    def make() -> Inputs:
        x = leaf(3, 4)
        return Inputs((x.t(), x[:, ::2], x[:1].expand(3, 4)), leaves=[x])

    same(lambda a, b, c: (F.dropout(a, 0.5), F.dropout(b, 0.5), F.dropout(c, 0.5)), make)


def test_an_explicit_generator() -> None:
    def run(fn: Callable[..., Any], generator: torch.Generator) -> Any:
        generator.manual_seed(3)
        torch.manual_seed(0)
        outs = [fn(leaf(3)) for _ in range(3)]
        return outs, generator.get_state(), torch.get_rng_state()

    g = torch.Generator()

    def fn(x: Tensor) -> Tensor:
        return x * torch.rand(3, generator=g) + torch.empty(3).normal_(generator=g)

    assert_equal(run(fn, g), run(strict(fn), g))


def test_a_generator_as_argument() -> None:
    def fn(x: Tensor, g: torch.Generator) -> Tensor:
        return x * torch.rand(3, generator=g)

    compiled = strict(fn)
    x = leaf(3)
    for seed in range(3):
        a, b = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        assert torch.equal(fn(x, a), compiled(x, b))
        assert torch.equal(a.get_state(), b.get_state())


def test_the_call_that_compiles_draws_as_eager_does() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    found = strict(lambda: torch.rand(3))()
    assert torch.equal(expected, found)


def test_backward_draws_nothing() -> None:
    compiled = strict(lambda x: F.dropout(x.sin(), 0.5))
    out = compiled(leaf(3)).sum()
    before = torch.get_rng_state()
    out.backward()
    assert torch.equal(before, torch.get_rng_state())


def test_a_new_pattern_of_tangents_draws_nothing() -> None:
    compiled = strict(lambda x: (F.dropout(x.sin(), 0.5), torch.rand_like(x) * x))
    x = leaf(3)
    outs = compiled(x)
    before = torch.get_rng_state()
    outs[1].sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_random_numbers_drawn_in_a_backward() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * torch.rand_like(g)

    def fn(x: Tensor) -> Tensor:
        return Noisy.apply(x)  # type: ignore[no-any-return]

    same(fn, one(3))


def test_python_and_numpy_numbers() -> None:
    """Numbers drawn by Python are drawn once per compile: a listed difference, but never the torch ones."""
    compiled = strict(lambda x: x * torch.rand(()))
    x = leaf(3)
    assert not torch.equal(compiled(x), compiled(x))


def test_fork_rng_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            noise = torch.rand(3)
        return x * noise + torch.rand(3)

    same_by_default(fn, one(3))


def test_initialisation_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        w = torch.empty(3, 4)
        nn.init.xavier_uniform_(w)
        return x @ w

    same(fn, one(2, 3))


def test_modules_with_dropout_in_turns() -> None:
    same_module(
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)),
        [(leaf(3, 4),), (leaf(2, 4),), (leaf(3, 4),)],
    )


def test_a_generator_made_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(3)
        return x + torch.randn(3, generator=g)

    uncompiled(fn, one(3), "a random generator is used that the function makes itself")


def test_a_generator_is_seeded_inside() -> None:
    g = torch.Generator()

    def fn(x: Tensor) -> Tensor:
        g.manual_seed(3)
        return x + torch.randn(3, generator=g)

    uncompiled(fn, one(3), "the random state is set inside")

"""One compiled callable, called again and again: entries, refusals and what identifies a call."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import FallbackWarning

from .common import assert_equal, strict


def alike(play: Callable[[Callable[[Any], Any]], Any], *, strictly: bool = False) -> None:
    """What a play gives with `compile` in its hands is what it gives with nothing done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = play(strict if strictly else aheadgrad.compile)
    assert_equal(play(lambda fn: fn), found)


@pytest.mark.parametrize("text", ["return None", "    return None", "return MISS"])
def test_strings_that_look_like_generated_code(text: str) -> None:
    def play(compile: Callable[[Any], Any]) -> Any:
        by_value = compile(lambda x, how: x * len(how))
        by_key = compile(lambda x, d: x * d[text])
        by_name = compile(lambda x, **kwargs: x * kwargs[text])
        x, out = torch.ones(1), []
        for n in (2, 2, 3):
            out += [by_value(x, text), by_key(x, {text: n}), by_name(x, **{text: n}), by_value(x, "other")]
        return out

    alike(play, strictly=True)


class Act(nn.Module):
    def __init__(self, act: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.weight)


class Scaled:
    def __init__(self) -> None:
        self.factor = torch.ones(1) * 3

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def half(self, x: Tensor) -> Tensor:
        return x * self.factor / 2


@aheadgrad.compile
def decorated(x: Tensor) -> Tensor:
    return x * 2


def plain(x: Tensor) -> Tensor:
    return x * 3


def test_a_compiled_function_is_copied_and_pickled_as_a_function_is() -> None:
    x = torch.ones(2)
    held = Act(strict(torch.tanh))
    expected = held(x)
    for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert torch.equal(other(x), expected)
        assert other.weight is not held.weight
    compiled = strict(plain)
    compiled(x)
    assert copy.deepcopy(compiled) is compiled
    assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), plain(x))
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_copies_of_compiled_objects_and_bound_methods_have_their_own() -> None:
    x, thing = torch.ones(2), Scaled()
    for compiled in (strict(thing), strict(thing.half)):
        before = compiled(x)
        for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
            assert torch.equal(other(x), before)
            thing.factor.mul_(2)
            assert torch.equal(other(x), before)
            thing.factor.div_(2)


def test_a_keyword_named_self() -> None:
    alike(lambda c: c(lambda x, self: x * self)(torch.ones(1), self=2.0), strictly=True)
    alike(lambda c: c(lambda x, args, kwargs: x * args - kwargs)(torch.ones(1), args=2.0, kwargs=1))

"""A miss says why; the limit says what keeps changing."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.errors import RecompileWarning

from .common import assert_equal, leaf, strict
from .test_guarded_modules import Net, hooked, switch


def test_a_miss_names_the_argument() -> None:
    def fn(x: Tensor, factor: int = 1, *, mode: str = "a") -> Tensor:
        return x * factor

    compiled = strict(fn, max_entries=32)
    with aheadgrad.explain_misses() as misses:
        compiled(torch.ones(8, 3))
        compiled(torch.ones(8, 3, dtype=torch.float64))
        compiled(torch.ones(8, 3, requires_grad=True))
        compiled(torch.ones(3, 8).t())
        compiled(torch.ones(8, 3), 2)
        compiled(torch.ones(8, 3), 2, mode="b")
        with torch.no_grad():
            compiled(torch.ones(8, 3))
        compiled(torch.ones(5, 3))
    compiled(torch.ones(4, 4, 4))
    texts = [str(m) for m in misses]
    assert len(texts) == 7
    for text, words in zip(
        texts,
        (
            ("tensor 'x' dtype mismatch", "expected Float, actual Double"),
            ("tensor 'x' requires_grad mismatch",),
            ("tensor 'x' stride mismatch at index 0", "expected 3, actual 1"),
            ("positional arguments: 1 was assumed, 2 came",),
            ("keyword arguments: [] was assumed, ['mode'] came",),
            ("grad mode: True was assumed, False came",),
            ("tensor 'x' size mismatch at index 0", "expected 8, actual 5"),
        ),
        strict=True,
    ):
        assert "fn: no entry fits this call" in text
        for word in words:
            assert word in text
    assert len(compiled.misses) == 8


def test_a_miss_names_what_is_reached() -> None:
    net = Net()
    compiled = strict(net, max_entries=32)
    x = leaf(4, 3)
    compiled(x)
    for change, words in (
        (switch("factor", 2.0), "factor: 1.0 was assumed, 2.0 came"),
        (switch("layers", [1, 2]), "layers: absent was assumed, [1, 2] came"),
        (switch("layers", [1, 3]), "layers: [1, 2] was assumed, [1, 3] came"),
        (lambda n: n.rest[0].eval(), "rest.0.training: True was assumed, False came"),
        (lambda n: n.first.requires_grad_(False), "first.weight"),
        (hooked, "first._forward_hooks: () was assumed, ("),
    ):
        change(net)
        compiled(x)
        assert words in str(compiled.misses[-1]), str(compiled.misses[-1])


def test_misses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    compiled = strict(lambda x, n: x * n)
    with caplog.at_level(logging.INFO, "aheadgrad.misses"):
        compiled(leaf(3), 1)
        compiled(leaf(3), 2)
    assert "n: 1 was assumed, 2 came" in caplog.text


def test_the_limit_names_what_keeps_changing_and_counts() -> None:
    def fn(x: Tensor, step: str) -> Tensor:
        return x * len(step)

    compiled = aheadgrad.compile(fn, max_entries=3, frontend="trace")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(10):
            assert_equal(compiled(leaf(3), "a" * step), leaf(3) * step)
    assert [w.category for w in seen] == [RecompileWarning]
    assert "What keeps changing: step ('', 'a', 'aa', 'aaa', " in str(seen[0].message)
    assert compiled.fallbacks == {"the limit of entries is reached": 7}

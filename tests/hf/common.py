"""Three training steps of a small model with random weights, compiled and in eager, side by side.

Everything that is seen (losses, gradients, parameters and buffers, the random state) is equal to the last
bit. Some models are excepted by name: where a graph returns what it goes on to use (a cache of keys and
values, what an encoder found), the gradients that meet there are added in another order than in eager. Their
losses, and their gradients as parts of the largest value, differ by no more than `LAST_BITS`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aheadgrad

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf: Any = pytest.importorskip("transformers")

VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 2, 3
LAST_BITS = 1e-5
NEXT_TO_NOTHING = 1e-3  # of the largest gradient: a gradient that is zero but for rounding has no digits
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, and a batch to train it on; the fast ones are part of `make test`."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    fast: bool = False


def tokens(length: int = LENGTH, low: int = 5) -> Tensor:
    """Words without the special ones, which models treat in their own ways."""
    return torch.randint(low, VOCABULARY, (BATCH, length))


def padded(length: int = LENGTH, left: bool = False) -> Tensor:
    """A mask of words: the first row is whole, the second lacks a quarter."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    lacking = length // 4
    mask[1, slice(0, lacking) if left else slice(length - lacking, length)] = 0
    return mask


def text() -> Batch:
    words, mask = tokens(), padded()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def text_padded_left() -> Batch:
    words, mask = tokens(), padded(left=True)
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def images(size: int = 16, labels: int = 4) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.arange(BATCH) % labels}


def train(model: nn.Module, call: Callable[..., Any], batches: list[Batch]) -> list[dict[str, Any]]:
    """What is seen after each step: loss, gradients, parameters and buffers, the random state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        np.random.seed(step)
        loss = call(**copy.deepcopy(batch)).loss
        loss.backward()
        random = torch.get_rng_state()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        state = {n: t.detach().clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        losses = {"loss": loss.detach().clone()}
        seen.append({"loss": losses, "grads": grads, "state": state, "random": {"cpu": random}})
    return seen


@contextmanager
def no_graph_left_out() -> Iterator[None]:
    """Dynamo starts anew, raises where it would give up compiling, and has compiled something."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    assert counters["stats"]["unique_graphs"] > 0


def scale_of(values: list[Any]) -> float:
    """The largest number among these tensors."""
    return max((float(v.abs().max()) for v in values if v is not None and v.numel()), default=0.0)


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference between tensors of the same names, as a part of the tensor's largest value."""
    assert list(found) == list(expected)
    floor = NEXT_TO_NOTHING * scale_of(list(expected.values())) or 1.0
    worst = 0.0
    for name, wanted in expected.items():
        got = found[name]
        assert (got is None) == (wanted is None), name
        if wanted is None or torch.equal(got, wanted):
            continue
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
        assert wanted.is_floating_point(), name
        worst = max(worst, float((got - wanted).abs().max()) / max(scale_of([wanted]), floor))
    return worst


def distances(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """The largest of all steps, for each kind of what is seen."""
    steps = list(zip(found, expected, strict=True))
    return {kind: max(distance(f[kind], e[kind]) for f, e in steps) for kind in expected[0]}


def compare(case: Case, **options: Any) -> dict[str, float]:
    """How far the compiled model is from eager; nothing of it has run uncompiled."""
    torch.manual_seed(0)
    model = case.make().train()
    twin = copy.deepcopy(model)
    batches = [case.batch() for _ in range(STEPS)]
    expected = train(twin, twin, batches)
    with no_graph_left_out():
        compiled = aheadgrad.compile(model, fallback="error", **options)
        found = train(model, compiled, batches)
    assert not compiled.fallbacks
    assert any(entry.entry.split.backwards for entry in compiled.entries)
    return distances(found, expected)


def check(case: Case, *, exact: bool) -> None:
    found = compare(case)
    assert found.pop("random") == 0.0
    assert max(found.values()) <= (0.0 if exact else LAST_BITS), found

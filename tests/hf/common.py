"""Three training steps of a small model with random weights, compiled and in eager, side by side."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf: Any = pytest.importorskip("transformers")

VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 2, 3
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, the batches that it trains on, and how much it may differ."""

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
        loss = call(**copy.deepcopy(batch)).loss
        loss.backward()
        random = torch.get_rng_state()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        state = {n: t.detach().clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        seen.append({"loss": loss.detach().clone(), "grads": grads, "state": state, "random": random})
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


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    if torch.equal(found, expected):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    scale = float(expected.abs().max()) or 1.0
    return float((found - expected).abs().max()) / scale


def differences(found: Any, expected: Any, path: str = "") -> dict[str, float]:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, path
        return {path: distance(found, expected)}
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        pairs = [(str(k), found[k], expected[k]) for k in expected]
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        pairs = [(str(i), found[i], expected[i]) for i in range(len(expected))]
    else:
        assert found is expected is None, path
        return {}
    return {k: v for name, f, e in pairs for k, v in differences(f, e, f"{path}.{name}").items()}


def compare(case: Case, **options: Any) -> dict[str, float]:
    """How far the compiled model is from eager in everything that is seen."""
    torch.manual_seed(0)
    model = case.make().train()
    twin = copy.deepcopy(model)
    batches = [case.batch() for _ in range(STEPS)]
    expected = train(twin, twin, batches)
    with no_graph_left_out():
        compiled = aheadgrad.compile(model, fallback="error", **options)
        found = train(model, compiled, batches)
    assert not getattr(compiled, "fallbacks", ())
    return differences(found, expected)

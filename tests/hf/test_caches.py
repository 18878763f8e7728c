"""Models that are given a cache of keys and values, go on from there, and hand it back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from tests.hf import common, decoders, encoders

DECODERS = ["gpt2", "llama", "mistral", "gpt_neox", "bloom"]


def in_two_parts(model: nn.Module, call: Callable[..., Any], words: Tensor) -> dict[str, Any]:
    """Reads the first half, then the second with what it kept of the first; one backward through both."""
    half = words.shape[1] // 2
    first = call(input_ids=words[:, :half], use_cache=True, labels=words[:, :half])
    mask = torch.ones_like(words)
    second = call(
        input_ids=words[:, half:],
        attention_mask=mask,
        past_key_values=first.past_key_values,
        use_cache=True,
        labels=words[:, half:],
    )
    (first.loss + second.loss).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    return {**found, "first": first.logits.detach(), "second": second.logits.detach()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "llama" else pytest.mark.zoo) for n in DECODERS]
)
def test_training_through_a_cache(name: str) -> None:
    torch.manual_seed(0)
    model = decoders.MODELS[name].make().eval()
    twin = copy.deepcopy(model)
    words = common.tokens()
    expected = in_two_parts(twin, twin, words)
    with common.no_graph_left_out():
        compiled = aheadgrad.compile(model, fallback="error")
        found = in_two_parts(model, compiled, words)
    assert not compiled.fallbacks
    assert common.distance(found, expected) <= common.LAST_BITS


def greedy(call: Callable[..., Any], words: Tensor, steps: int) -> list[Tensor]:
    """One word after the other, each from the cache of those before."""
    past, seen, next_words = None, [], words
    for _ in range(steps):
        out = call(input_ids=next_words, past_key_values=past, use_cache=True)
        past, next_words = out.past_key_values, out.logits[:, -1:].argmax(-1)
        seen += [out.logits, next_words]
    return seen


@pytest.mark.zoo
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_a_cache(name: str) -> None:
    torch.manual_seed(0)
    model = decoders.MODELS[name].make().eval()
    words = common.tokens(6)
    with torch.no_grad():
        expected = greedy(model, words, 4)
        with common.no_graph_left_out():
            compiled = aheadgrad.compile(model, fallback="error")
            found = greedy(compiled, words, 4)
    assert not compiled.fallbacks
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_translating_with_a_cache(name: str) -> None:
    """The encoder runs once, uncompiled as its own call; the decoder goes on from its cache."""
    torch.manual_seed(0)
    model: Any = encoders.MODELS[name].make().eval()
    source = common.tokens(8)

    def translate(call: Callable[..., Any]) -> list[Tensor]:
        read, past, words, seen = model.get_encoder()(source), None, torch.zeros(2, 1, dtype=torch.long), []
        for _ in range(3):
            out = call(encoder_outputs=read, decoder_input_ids=words, past_key_values=past, use_cache=True)
            past, words = out.past_key_values, out.logits[:, -1:].argmax(-1)
            seen += [out.logits, words]
        return seen

    with torch.no_grad():
        expected = translate(model)
        with common.no_graph_left_out():
            compiled = aheadgrad.compile(model, fallback="error")
            found = translate(compiled)
    assert not compiled.fallbacks
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))

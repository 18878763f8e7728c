"""Thirty families of Hugging Face models with Inductor: as near to eager as `torch.compile` is.

Each trains two steps three times: in eager, with `torch.compile`, with ours. Losses and gradients of ours are
no farther from eager's than `FACTOR` times those of torch.compile, or than `ROUNDING`. All draw eager's
random numbers (`fallback_random`), so dropout is on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

import aheadgrad
from aheadgrad.torchlayer.inductor import missing
from tests.hf import common, decoders, encoders, senses

MODELS = {**decoders.MODELS, **encoders.MODELS, **senses.MODELS}
NAMES = [
    *("gpt2", "gpt_neox", "llama", "qwen3", "gemma", "phi", "opt", "bloom", "falcon", "mpt"),
    *("mixtral with products of batches", "deepseek_v3", "mamba", "rwkv"),
    *("bert", "albert", "distilbert", "electra", "deberta", "modernbert", "xlnet", "fnet"),
    *("t5", "bart", "vit", "swin", "convnext", "resnet", "clip", "wav2vec2"),
]
FACTOR = 2.0
"""Two ways of rounding the same sums differ from a third by amounts of one size, not by the same amounts."""
ROUNDING = 2e-6
"""Seventeen units in the last place of a float32: what sums of some hundred numbers in another order give,
where torch.compile happens to take the order of eager."""

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.skipif(missing("cpu") is not None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
]


def by_torch(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model)


def by_us(model: nn.Module) -> Callable[..., Any]:
    return aheadgrad.compile(model, backend="inductor", fallback="error")


def distances(name: str) -> tuple[dict[str, float], dict[str, float]]:
    """How far torch.compile is from eager, and how far we are: losses, gradients, random states."""
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.make().train()
    batches = [case.batch() for _ in range(2)]
    expected = common.train(twin := copy.deepcopy(model), twin, batches)
    found = []
    for compiler in (by_torch, by_us):
        with common.no_graph_left_out(), config.patch(fallback_random=True):
            twin = copy.deepcopy(model)
            found.append(common.distances(common.train(twin, compiler(twin), batches), expected))
    return found[0], found[1]


@pytest.mark.parametrize("name", NAMES)
def test_no_farther_from_eager_than_torch_compile(name: str) -> None:
    torchs, ours = distances(name)
    print(f"\n{name}: " + ", ".join(f"{k} {torchs[k]:.1e} {ours[k]:.1e}" for k in ("loss", "grads")))
    assert ours["random"] == 0.0
    assert max(torchs.values()) < 1e-3, "torch.compile did something else: nothing to compare with"
    for kind in ("loss", "grads"):
        assert ours[kind] <= max(FACTOR * torchs[kind], ROUNDING), (kind, torchs, ours)

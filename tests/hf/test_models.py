"""Small Hugging Face models train three steps through the default front end as in eager.

`make test` runs the fast ones, `make test-hf` all of them.
"""

from __future__ import annotations

import copy

import pytest
import torch

import aheadgrad
from tests.hf import common, decoders, encoders, senses

MODELS = {**decoders.MODELS, **encoders.MODELS, **senses.MODELS}
LAST_BITS_DIFFER = {
    "gpt_neo",
    "gptj",
    "opt",
    "llama",
    "llama with attention dropout",
    "llama with plain attention",
    "qwen2",
    "qwen3",
    "phi",
    "gemma",
    "gemma2",
    "stablelm",
    "starcoder2",
    "olmo2",
    "cohere",
    "granite",
    "glm",
    "smollm3",
    "xglm",
    "biogpt",
    "ctrl",
    "mixtral",
    "mixtral with products of batches",
    "mixtral with an expert at a time",
    "mixtral with router loss",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "switch_transformers",
    "nllb_moe",
    "mamba",
    "mamba without cache",
    "falcon_mamba",
    "bamba",
    "lfm2",
    "longformer",
    "xlm",
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "bart",
    "mbart",
    "pegasus",
    "m2m_100",
    "marian",
    "blenderbot",
    "led",
    "prophetnet",
    "llava",
    "whisper",
    "speech_to_text",
}
pytestmark = [
    # About functions that cache: Dynamo looks through the cache, and says so.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    # What transformers does with torch.
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
]


def all_of_them() -> list[object]:
    found = []
    for name, case in MODELS.items():
        marks = [] if case.fast else [pytest.mark.zoo]
        found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", all_of_them())
def test_three_steps(name: str) -> None:
    common.check(MODELS[name], exact=name not in LAST_BITS_DIFFER)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_more_steps_with_other_batch_sizes(name: str) -> None:
    """From the second batch size on, the graphs are compiled for every size."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name].make().train()
    twin = copy.deepcopy(model)
    compiled = aheadgrad.compile(model, fallback="error")
    counts = []
    for size in (3, 4, 5, 6):
        batch = {k: v[:1].repeat_interleave(size, 0) for k, v in MODELS[name].batch().items()}
        found, expected = common.train(model, compiled, [batch]), common.train(twin, twin, [batch])
        assert max(common.distances(found, expected).values()) <= common.LAST_BITS
        counts.append(len(compiled.entries))
    assert counts[1] == counts[2] == counts[3]

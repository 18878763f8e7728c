"""Small Hugging Face models, with random weights, train one step under our backend as in eager.

Loss and logits are equal to the last bit, dropout included: the compiled graph draws the same random numbers.
Gradients, and parameters after the step, may differ in the last bit where several contributions are summed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aheadgrad.frontends import boxed

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
hf: Any = transformers
VOCABULARY, LENGTH = 64, 12

WIDE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = {**WIDE, "intermediate_size": 32, "max_position_embeddings": 40}
DECODER = {**ENCODER, "num_key_value_heads": 1}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER)),
    "distilbert": lambda: hf.DistilBertForMaskedLM(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32
        )
    ),
    "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(embedding_size=8, **ENCODER, **DROPOUT)),
    "electra": lambda: hf.ElectraForMaskedLM(hf.ElectraConfig(embedding_size=8, **ENCODER)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**ENCODER)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=40, **WIDE)
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.1)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(sliding_window=8, **DECODER)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(resid_pdrop=0.1, **ENCODER)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            num_labels=4,
            **DROPOUT,
        )
    ),
}


def make_batch(name: str, size: int) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.arange(size) % 4}
    tokens = torch.randint(3, VOCABULARY, (size, LENGTH))
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def train_one_step(model: nn.Module, call: Callable[..., Any], batch: dict[str, Tensor]) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    out = call(**batch)
    out.loss.backward()
    names = dict(model.named_parameters())
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in names.items()}
    optimizer.step()
    optimizer.zero_grad()
    parameters = {n: p.detach().clone() for n, p in names.items()}
    return [out.loss.detach(), out.logits.detach(), gradients, parameters, torch.get_rng_state()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for part in (0, 1, -1):
        assert torch.equal(found[part], expected[part])
    for part in (2, 3):
        for name, wanted in expected[part].items():
            got = found[part][name]
            assert (got is None) == (wanted is None), name
            if wanted is not None:
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7, msg=lambda t: f"{name}: {t}")


@pytest.mark.parametrize("name", MODELS)
def test_one_step(name: str, compiled_graphs: list[boxed.BoxedEntry]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().train()
    twin = copy.deepcopy(model)
    batch = make_batch(name, 2)
    options = {"backend": "eager", "fallback": "error"}
    compiled = torch.compile(model, backend="aheadgrad", options=options)
    assert_same(train_one_step(model, compiled, batch), train_one_step(twin, twin, batch))
    assert any(graph.entry.split.backwards for graph in compiled_graphs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_more_steps_with_other_batch_sizes(name: str, compiled_graphs: list[boxed.BoxedEntry]) -> None:
    """From the second batch size on, the graph is compiled for every size."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aheadgrad", options={"fallback": "error"})
    counts = []
    for size in (3, 4, 5, 6):
        batch = make_batch(name, size)
        found, expected = train_one_step(model, compiled, batch), train_one_step(twin, twin, batch)
        torch.testing.assert_close(found, expected)
        counts.append(len(compiled_graphs))
    assert counts[1] == counts[2] == counts[3]

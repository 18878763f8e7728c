"""Models that read a whole text, or turn one text into another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.hf.common import BATCH, VOCABULARY, Batch, Case, hf, padded, text, tokens

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
FACTORED = {**PLAIN, "embedding_size": 8}
TRANSLATOR = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "decoder_start_token_id": 2,
    **SPECIAL,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


def case(name: str, head: str, *, fast: bool = False, batch: Any = text, **settings: Any) -> Case:
    def make() -> nn.Module:
        return getattr(hf, f"{name}For{head}")(getattr(hf, f"{name}Config")(**settings))

    return Case(make, batch, fast=fast)


def masked(name: str, **settings: Any) -> Case:
    return case(name, "MaskedLM", **settings)


def translator(name: str, **settings: Any) -> Case:
    return case(name, "ConditionalGeneration", **settings)


def classes() -> Batch:
    return {"input_ids": tokens(), "attention_mask": padded(), "labels": torch.arange(BATCH) % 2}


def each_word() -> Batch:
    words = tokens()
    return {"input_ids": words, "attention_mask": padded(), "labels": words % 2}


def spans() -> Batch:
    starts = torch.arange(BATCH) + 1
    return {
        "input_ids": tokens(),
        "attention_mask": padded(),
        "start_positions": starts,
        "end_positions": starts + 2,
    }


def choices() -> Batch:
    words = torch.randint(5, VOCABULARY, (BATCH, 3, 8))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.arange(BATCH) % 3}


def global_words() -> Batch:
    batch = text()
    whole = torch.zeros_like(batch["input_ids"])
    whole[:, 0] = 1
    return {**batch, "global_attention_mask": whole}


ENCODERS = {
    "bert": masked("Bert", **PLAIN, fast=True),
    "bert with plain attention": masked("Bert", **PLAIN, attn_implementation="eager"),
    "bert choosing": case("Bert", "MultipleChoice", **PLAIN, batch=choices),
    "roberta": masked("Roberta", **PLAIN),
    "roberta classifying": case("Roberta", "SequenceClassification", **PLAIN, batch=classes),
    "electra": masked("Electra", **FACTORED),
    "electra discriminating": case("Electra", "PreTraining", **FACTORED, batch=each_word),
    "albert": masked(
        "Albert", **FACTORED, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, fast=True
    ),
    "distilbert": masked(
        "DistilBert",
        vocab_size=VOCABULARY,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=40,
        fast=True,
    ),
    "distilbert answering": case(
        "DistilBert",
        "QuestionAnswering",
        vocab_size=VOCABULARY,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=40,
        batch=spans,
    ),
    "deberta": masked(
        "Deberta", **PLAIN, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16
    ),
    "deberta_v2": masked(
        "DebertaV2", **PLAIN, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "xlm_roberta": masked("XLMRoberta", **PLAIN),
    "mpnet": masked("MPNet", **PLAIN),
    "modernbert": masked(
        "ModernBert",
        **PLAIN,
        local_attention=8,
        cls_token_id=3,
        sep_token_id=4,
        bos_token_id=3,
        eos_token_id=4,
    ),
    "mobilebert": masked(
        "MobileBert", **{**PLAIN, "num_hidden_layers": 1}, embedding_size=16, intra_bottleneck_size=16
    ),
    "convbert": masked(
        "ConvBert", **{**PLAIN, "num_attention_heads": 4}, embedding_size=16, conv_kernel_size=3
    ),
    "squeezebert": masked("SqueezeBert", **PLAIN, embedding_size=16),
    "roformer": masked("RoFormer", **FACTORED),
    "rembert": masked("RemBert", **PLAIN, input_embedding_size=8, output_embedding_size=8),
    "esm": masked("Esm", **PLAIN, mask_token_id=4, position_embedding_type="rotary", token_dropout=True),
    "fnet": case(
        "FNet",
        "MaskedLM",
        **PLAIN,
        batch=lambda: {k: v for k, v in text().items() if k != "attention_mask"},
    ),
    "canine": case(
        "Canine",
        "SequenceClassification",
        **PLAIN,
        batch=classes,
        downsampling_rate=4,
        num_hash_buckets=64,
        local_transformer_stride=4,
    ),
    "longformer": masked("Longformer", **PLAIN, attention_window=4, batch=global_words),
    "big_bird": masked("BigBird", **PLAIN, block_size=2, num_random_blocks=1, attention_type="original_full"),
    "ibert": masked("IBert", **PLAIN),
    "funnel": masked(
        "Funnel",
        vocab_size=VOCABULARY,
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=32,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    "xlnet": Case(
        lambda: hf.XLNetLMHeadModel(
            hf.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=32)
        ),
        text,
    ),
    "xlm": case(
        "XLM",
        "SequenceClassification",
        vocab_size=VOCABULARY,
        emb_dim=16,
        n_layers=2,
        n_heads=2,
        max_position_embeddings=40,
        batch=classes,
    ),
    "layoutlm": masked("LayoutLM", **PLAIN),
    "perceiver": Case(
        lambda: hf.PerceiverForMaskedLM(
            hf.PerceiverConfig(
                vocab_size=VOCABULARY,
                num_latents=4,
                d_latents=16,
                d_model=16,
                num_blocks=1,
                num_self_attends_per_block=2,
                num_self_attention_heads=2,
                num_cross_attention_heads=2,
                qk_channels=16,
                v_channels=16,
                max_position_embeddings=12,
            )
        ),
        text,
    ),
}

TRANSLATORS = {
    "t5": translator("T5", **T5, fast=True),
    "t5 without cache": translator("T5", **T5, use_cache=False),
    "mt5": translator("MT5", **T5, feed_forward_proj="gated-gelu"),
    "umt5": translator("UMT5", **T5),
    "longt5": translator("LongT5", **T5, local_radius=3),
    "switch_transformers": translator(
        "SwitchTransformers",
        **T5,
        num_decoder_layers=2,
        num_experts=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    "bart": translator("Bart", **TRANSLATOR, fast=True),
    "mbart": translator("MBart", **TRANSLATOR, encoder_layerdrop=0.5, decoder_layerdrop=0.5),
    "pegasus": translator("Pegasus", **TRANSLATOR),
    "m2m_100": translator("M2M100", **TRANSLATOR),
    "nllb_moe": translator(
        "NllbMoe",
        **TRANSLATOR,
        num_experts=2,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        expert_capacity=8,
    ),
    "marian": Case(lambda: hf.MarianMTModel(hf.MarianConfig(**TRANSLATOR)), text),
    "blenderbot": translator("Blenderbot", **TRANSLATOR),
    "led": translator(
        "LED",
        **{k: v for k, v in TRANSLATOR.items() if k != "max_position_embeddings"},
        attention_window=4,
        max_encoder_position_embeddings=40,
        max_decoder_position_embeddings=40,
    ),
    "prophetnet": translator(
        "ProphetNet",
        vocab_size=VOCABULARY,
        hidden_size=16,
        encoder_ffn_dim=32,
        num_encoder_layers=2,
        num_encoder_attention_heads=2,
        decoder_ffn_dim=32,
        num_decoder_layers=2,
        num_decoder_attention_heads=2,
        max_position_embeddings=40,
        decoder_start_token_id=0,
        num_buckets=8,
        relative_max_distance=16,
        disable_ngram_loss=False,
    ),
}

MODELS = {**ENCODERS, **TRANSLATORS}

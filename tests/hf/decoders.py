"""Language models that read from left to right: plain, with experts, with state spaces."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.hf.common import LENGTH, VOCABULARY, Case, hf, text, text_padded_left

WIDE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {**WIDE, **SPECIAL, "intermediate_size": 32, "max_position_embeddings": 40}
GROUPED = {**PLAIN, "num_key_value_heads": 1}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {**HEADS, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
BATCHED = {"experts_implementation": "batched_mm"}  # the default is a custom op that looks at values


def causal(name: str, **settings: Any) -> nn.Module:
    """`<Name>ForCausalLM` of a `<Name>Config`."""
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**settings))


def case(name: str, *, fast: bool = False, batch: Any = text, **settings: Any) -> Case:
    return Case(lambda: causal(name, **settings), batch, fast=fast)


def gpt2(**settings: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **SPECIAL, **settings))


PLAIN_DECODERS = {
    "gpt2": Case(gpt2, text, fast=True),
    "gpt2 without cache": Case(lambda: gpt2(use_cache=False), text),
    "gpt2 padded left": Case(gpt2, text_padded_left),
    "gpt_neo": case(
        "GPTNeo",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=40,
        resid_dropout=0.1,
        **SPECIAL,
    ),
    "gpt_neox": case("GPTNeoX", **PLAIN, hidden_dropout=0.1, fast=True),
    "gptj": case(
        "GPTJ", vocab_size=VOCABULARY, n_positions=40, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, **SPECIAL
    ),
    "gpt_bigcode": case(
        "GPTBigCode", vocab_size=VOCABULARY, n_positions=40, n_embd=16, n_layer=2, n_head=2, **SPECIAL
    ),
    "codegen": case(
        "CodeGen",
        vocab_size=VOCABULARY,
        n_positions=40,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        **SPECIAL,
    ),
    "opt": case("OPT", **WIDE, **SPECIAL, ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=40),
    "bloom": case(
        "Bloom", vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.1, **SPECIAL
    ),
    "falcon": case("Falcon", **WIDE, **SPECIAL, hidden_dropout=0.1),
    "mpt": case(
        "Mpt", vocab_size=VOCABULARY, d_model=16, n_layers=2, n_heads=2, max_seq_len=LENGTH, **SPECIAL
    ),
    "llama": case("Llama", **GROUPED, fast=True),
    "llama without cache": case("Llama", **GROUPED, use_cache=False),
    "llama with attention dropout": case("Llama", **GROUPED, attention_dropout=0.1, batch=text_padded_left),
    "llama with plain attention": case("Llama", **GROUPED, attn_implementation="eager"),
    "mistral": case("Mistral", **GROUPED, sliding_window=4),
    "qwen2": case("Qwen2", **GROUPED),
    "qwen3": case("Qwen3", **HEADS, fast=True),
    "phi": case("Phi", **PLAIN, resid_pdrop=0.1),
    "phi3": case("Phi3", **GROUPED),
    "gemma": case("Gemma", **HEADS, fast=True),
    "gemma2": case("Gemma2", **HEADS, sliding_window=4),
    "gemma3": Case(lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**HEADS, sliding_window=4)), text),
    "stablelm": case("StableLm", **GROUPED),
    "starcoder2": case("Starcoder2", **GROUPED),
    "olmo2": case("Olmo2", **GROUPED),
    "cohere": case("Cohere", **GROUPED),
    "granite": case("Granite", **GROUPED),
    "glm": case("Glm", **HEADS),
    "smollm3": case("SmolLM3", **GROUPED),
    "xglm": case(
        "XGLM",
        vocab_size=VOCABULARY,
        d_model=16,
        num_layers=2,
        attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=40,
        **SPECIAL,
    ),
    "biogpt": case("BioGpt", **PLAIN),
    "ctrl": Case(
        lambda: hf.CTRLLMHeadModel(
            hf.CTRLConfig(vocab_size=VOCABULARY, n_positions=40, n_embd=16, dff=32, n_layer=2, n_head=2)
        ),
        text,
    ),
}

EXPERT_DECODERS = {
    "mixtral": case("Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "mixtral with products of batches": case(
        "Mixtral",
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        **BATCHED,
        fast=True,
    ),
    "mixtral with router loss": case(
        "Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **BATCHED
    ),
    "mixtral with an expert at a time": case(
        "Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    ),
    "qwen2_moe": case(
        "Qwen2Moe", **BATCHED, **EXPERTS, shared_expert_intermediate_size=16, decoder_sparse_step=1
    ),
    "qwen3_moe": case("Qwen3Moe", **BATCHED, **EXPERTS, decoder_sparse_step=1),
    "olmoe": case("Olmoe", **BATCHED, **GROUPED, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": case(
        "GptOss", **BATCHED, **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "granitemoe": case("GraniteMoe", **BATCHED, **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": case(
        "DeepseekV3",
        **BATCHED,
        **PLAIN,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}

RECURRENT_DECODERS = {
    "mamba": case(
        "Mamba",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        fast=True,
        **SPECIAL,
    ),
    "mamba without cache": case(
        "Mamba",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        use_cache=False,
        **SPECIAL,
    ),
    "mamba2": case(
        "Mamba2",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        num_heads=4,
        head_dim=8,
        expand=2,
        n_groups=1,
        chunk_size=4,
        **SPECIAL,
    ),
    "falcon_mamba": case(
        "FalconMamba", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4, **SPECIAL
    ),
    "bamba": case(
        "Bamba",
        **GROUPED,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    "jamba": case(
        "Jamba",
        **BATCHED,
        **GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "rwkv": case(
        "Rwkv", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, context_length=32, **SPECIAL
    ),
    "recurrent_gemma": case(
        "RecurrentGemma",
        **HEADS,
        lru_width=16,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    "lfm2": case("Lfm2", **GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=8),
}

MODELS = {**PLAIN_DECODERS, **EXPERT_DECODERS, **RECURRENT_DECODERS}

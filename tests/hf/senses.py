"""Models of pictures and of sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.hf.common import BATCH, VOCABULARY, Batch, Case, hf, images, padded, tokens

PATCHES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
WAVES = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "group",
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
}


def sees(name: str, *, fast: bool = False, batch: Any = images, **settings: Any) -> Case:
    def make() -> nn.Module:
        config = getattr(hf, f"{name}Config")(num_labels=4, **settings)
        return getattr(hf, f"{name}ForImageClassification")(config)

    return Case(make, batch, fast=fast)


def hears(name: str, *, fast: bool = False, **settings: Any) -> Case:
    def make() -> nn.Module:
        config = getattr(hf, f"{name}Config")(**{**WAVES, **settings})
        return getattr(hf, f"{name}ForCTC")(config)

    return Case(make, sound, fast=fast)


def large() -> Batch:
    return images(32)


def sound() -> Batch:
    return {
        "input_values": torch.randn(BATCH, 480),
        "attention_mask": padded(480),
        "labels": torch.randint(1, 12, (BATCH, 4)),
    }


def spectrum() -> Batch:
    return {"input_features": torch.randn(BATCH, 16, 24), "labels": tokens(8)}


def pairs() -> Batch:
    return {
        "input_ids": tokens(),
        "attention_mask": padded(),
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "return_loss": True,
    }


def segments() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 4, (BATCH, 32, 32))}


def only_pixels() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16)}


WORDS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


def clip(name: str, **settings: Any) -> nn.Module:
    config = getattr(hf, f"{name}Config")(text_config=WORDS, vision_config=PATCHES, **settings)
    return getattr(hf, f"{name}Model")(config)


def vision_language() -> Batch:
    words = tokens()
    words[:, :4] = 3
    return {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "labels": words,
    }


def llava() -> nn.Module:
    words = {**WORDS, "model_type": "llama", "num_key_value_heads": 1}
    seen = {**PATCHES, "model_type": "clip_vision_model", "projection_dim": 16}
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            text_config=words,
            vision_config=seen,
            image_token_index=3,
            image_seq_length=4,
            vision_feature_layer=-1,
        )
    )


SEEING = {
    "vit": sees("ViT", **PATCHES, **DROPOUT, fast=True),
    "deit": sees("DeiT", **PATCHES, **DROPOUT),
    "beit": sees(
        "Beit", **PATCHES, drop_path_rate=0.1, use_relative_position_bias=True, layer_scale_init_value=0.1
    ),
    "dinov2": sees(
        "Dinov2", **{k: v for k, v in PATCHES.items() if k != "intermediate_size"}, drop_path_rate=0.1
    ),
    "vit_mae": Case(
        lambda: hf.ViTMAEForPreTraining(
            hf.ViTMAEConfig(
                **PATCHES,
                decoder_hidden_size=16,
                decoder_num_hidden_layers=1,
                decoder_num_attention_heads=2,
                decoder_intermediate_size=32,
                mask_ratio=0.5,
            )
        ),
        only_pixels,
    ),
    "swin": sees(
        "Swin",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        batch=large,
    ),
    "swinv2": sees(
        "Swinv2",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        batch=large,
    ),
    "convnext": sees(
        "ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.1, fast=True
    ),
    "convnextv2": sees("ConvNextV2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "resnet": sees(
        "ResNet",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        batch=large,
        fast=True,
    ),
    "regnet": sees(
        "RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8, batch=large
    ),
    "mobilenet_v2": sees("MobileNetV2", image_size=32, depth_multiplier=0.25, batch=large),
    "mobilevit": sees(
        "MobileViT",
        image_size=32,
        patch_size=2,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32],
        num_attention_heads=2,
        batch=large,
    ),
    "poolformer": sees("PoolFormer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], batch=large),
    "pvt": sees(
        "Pvt",
        image_size=32,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_attention_heads=[1, 2],
        num_encoder_blocks=2,
        sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        batch=large,
    ),
    "segformer": Case(
        lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                num_labels=4,
                hidden_sizes=[8, 8, 16, 16],
                depths=[1, 1, 1, 1],
                num_attention_heads=[1, 1, 2, 2],
                decoder_hidden_size=16,
            )
        ),
        segments,
    ),
    "clip": Case(lambda: clip("CLIP", projection_dim=16), pairs, fast=True),
    "siglip": Case(lambda: clip("Siglip"), pairs),
    "llava": Case(llava, vision_language),
}

HEARING = {
    "wav2vec2": hears("Wav2Vec2", fast=True),
    "hubert": hears("Hubert"),
    "wavlm": hears("WavLM", num_buckets=8, max_bucket_distance=16),
    "unispeech": hears("UniSpeech", num_ctc_classes=12),
    "sew": hears("SEW", squeeze_factor=2),
    "whisper": Case(
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                vocab_size=VOCABULARY,
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                num_mel_bins=16,
                max_source_positions=12,
                max_target_positions=16,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        spectrum,
    ),
    "speech_to_text": Case(
        lambda: hf.Speech2TextForConditionalGeneration(
            hf.Speech2TextConfig(
                vocab_size=VOCABULARY,
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                conv_channels=16,
                input_feat_per_channel=16,
                decoder_start_token_id=2,
            )
        ),
        lambda: {
            "input_features": torch.randn(BATCH, 24, 16),
            "attention_mask": padded(24),
            "labels": tokens(8),
        },
    ),
    "audio_spectrogram_transformer": Case(
        lambda: hf.ASTForAudioClassification(
            hf.ASTConfig(
                **{k: v for k, v in PATCHES.items() if k != "image_size"},
                num_mel_bins=16,
                max_length=24,
                num_labels=4,
            )
        ),
        lambda: {"input_values": torch.randn(BATCH, 24, 16), "labels": torch.arange(BATCH)},
    ),
}

MODELS = {**SEEING, **HEARING}

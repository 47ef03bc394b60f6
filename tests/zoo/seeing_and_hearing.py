"""Small models of Hugging Face transformers for images, sound and pairs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tests.zoo.case import Case, Entry, loss_of
from tests.zoo.hugging_face import (
    BATCH,
    HEADS,
    LAYERS,
    PAIRED,
    SEQ,
    SIZES,
    VOCAB,
    WIDTH,
    named,
    random_ids,
)

SIDE = 32
LAYERED = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}
PATCHES = {**LAYERED, "image_size": SIDE, "patch_size": 8}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "ViT": PATCHES,
    "Dinov2": {**PATCHES, "drop_path_rate": 0.1},
    "Swin": {
        "image_size": SIDE, "patch_size": 4, "embed_dim": 32, "depths": [1, 1],
        "num_heads": [2, 4], "window_size": 4,
    },
}  # fmt: skip
HEARD = {
    "vocab_size": 32,
    **LAYERED,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
UNMASKED = {"mask_time_prob": 0.0, "apply_spec_augment": False, "layerdrop": 0.0}


def images(side: int = SIDE) -> Tensor:
    """Random ones."""
    return torch.randn(BATCH, 3, side, side)


def classifier(kind: str) -> Case:
    """A model that tells what is on an image."""
    model = named(kind, "ForImageClassification", {**CLASSIFIERS[kind], "num_labels": 10})
    kwargs = {"pixel_values": images(), "labels": torch.randint(10, (BATCH,))}
    return Case(model, kwargs=kwargs, loss_fn=loss_of)


def clip() -> Case:
    """Texts and images, matched."""
    texts = {**SIZES, "eos_token_id": 2}
    sizes = {"text_config": texts, "vision_config": PATCHES, "projection_dim": 32}
    kwargs = {"input_ids": random_ids(), "pixel_values": images(), "return_loss": True}
    return Case(named("CLIP", "Model", sizes), kwargs=kwargs, loss_fn=loss_of)


def whisper(**options: Any) -> Case:
    """Speech to text."""
    sizes = {
        **PAIRED, "num_mel_bins": 16, "max_source_positions": SEQ, "max_target_positions": SEQ,
        "suppress_tokens": None, "begin_suppress_tokens": None, "dropout": 0.1,
    }  # fmt: skip
    kwargs = {
        "input_features": torch.randn(BATCH, 16, 2 * SEQ),
        "labels": torch.randint(3, VOCAB, (BATCH, SEQ)),
        "use_cache": False,
    }
    model = named("Whisper", "ForConditionalGeneration", {**sizes, **options})
    return Case(model, kwargs=kwargs, loss_fn=loss_of)


def wav2vec2() -> Case:
    """Speech to letters, without the masks that NumPy draws.

    The loss that is meant for it, CTC, looks at the values of its labels.
    """
    model = named("Wav2Vec2", "ForCTC", {**HEARD, **UNMASKED})
    return Case(model, (torch.randn(BATCH, 640),), loss_fn=_squared_logits)


def _squared_logits(output: Any) -> Tensor:
    return output.logits.square().mean()


def detr() -> Case:
    """Boxes around what is on an image."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    config = DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, backbone=None,
        use_pretrained_backbone=False, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_queries=10, num_labels=5,
    )  # fmt: skip
    model = DetrForObjectDetection(config).train()
    return Case(model, (images(64),), loss_fn=_found)


def _found(output: Any) -> Tensor:
    return _squared_logits(output) + output.pred_boxes.square().mean()


BUILT = {
    **{kind: functools.partial(classifier, kind) for kind in CLASSIFIERS},
    "CLIP": clip,
    "Whisper": whisper,
    "Wav2Vec2": wav2vec2,
}
ENTRIES = {
    **{f"Hugging Face {name}": Entry(build, "transformers") for name, build in BUILT.items()},
    "Hugging Face DETR": Entry(
        detr,
        "transformers",
        refused=r"(?s)torch\.compile.*depends on tensor data \(module model\.encoder\.layers\.0",
    ),
    "Hugging Face Whisper, layer drop": Entry(
        functools.partial(whisper, encoder_layerdrop=0.1),
        "transformers",
        refused=r"(?s)layerdrop, stochastic depth\) to 0.*a random number",
    ),
    "Hugging Face Whisper, masks in time": Entry(
        functools.partial(whisper, apply_spec_augment=True),
        "transformers",
        refused="draws from numpy.random",
    ),
}

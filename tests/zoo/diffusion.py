"""Small models of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Entry

BATCH, WIDTH, SIDE, SEQ = 2, 32, 16, 8
BLOCKS: dict[str, Any] = {
    "block_out_channels": (WIDTH, 2 * WIDTH), "layers_per_block": 1, "norm_num_groups": 8,
}  # fmt: skip
ATTENTION: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2}


def denoising(output: Any, target: Tensor) -> Tensor:
    """The loss: how far the noise is from what is predicted."""
    return nn.functional.mse_loss(output[0], target)


def _noised(model: nn.Module, latents: Tensor, **kwargs: Any) -> Case:
    given = {"hidden_states": latents, **kwargs}
    return Case(
        model.train(), kwargs=given, loss_fn=denoising, target=torch.randn_like(latents)
    )  # fmt: skip


def _latents() -> Tensor:
    return torch.randn(BATCH, 4, SIDE, SIDE)


def dit() -> Case:
    """A transformer over patches, by class."""
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        **ATTENTION, in_channels=4, out_channels=4, num_layers=2, sample_size=SIDE, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    labels = torch.randint(10, (BATCH,))
    timestep = torch.randint(10, (BATCH,))
    return _noised(model, _latents(), timestep=timestep, class_labels=labels, return_dict=False)


def unet() -> Case:
    """A U-Net with attention and dropout."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        **BLOCKS, sample_size=SIDE, in_channels=3, out_channels=3, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), dropout=0.1,
    )  # fmt: skip
    pixels = torch.randn(BATCH, 3, SIDE, SIDE)
    batch = pixels, torch.randint(1000, (BATCH,))
    return Case(model.train(), batch, loss_fn=denoising, target=torch.randn_like(pixels))


def conditional_unet() -> Case:
    """The U-Net of Stable Diffusion."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        **BLOCKS, sample_size=SIDE, cross_attention_dim=WIDTH, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    latents, text = _latents(), torch.randn(BATCH, SEQ, WIDTH)
    batch = latents, torch.randint(1000, (BATCH,))
    given = {"encoder_hidden_states": text}
    return Case(model.train(), batch, given, denoising, torch.randn_like(latents))


def autoencoder() -> Case:
    """Images to latents, of which one is drawn, and back."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        **BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pixels = torch.randn(BATCH, 3, SIDE, SIDE)
    return Case(model.train(), (pixels,), {"sample_posterior": True}, denoising, pixels)


def sd3() -> Case:
    """The transformer of Stable Diffusion 3."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        **ATTENTION, sample_size=SIDE, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
        joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pooled_projection_dim=WIDTH,
        pos_embed_max_size=SIDE, qk_norm="rms_norm",
    )  # fmt: skip
    text, pooled = torch.randn(BATCH, SEQ, WIDTH), torch.randn(BATCH, WIDTH)
    return _noised(
        model, _latents(), encoder_hidden_states=text, pooled_projections=pooled,
        timestep=torch.rand(BATCH) * 1000,
    )  # fmt: skip


def flux() -> Case:
    """The transformer of Flux, over a sequence of patches."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        **ATTENTION, patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )  # fmt: skip
    text, pooled = torch.randn(BATCH, SEQ, WIDTH), torch.randn(BATCH, WIDTH)
    return _noised(
        model, torch.randn(BATCH, SIDE, 16), encoder_hidden_states=text, pooled_projections=pooled,
        timestep=torch.rand(BATCH), img_ids=torch.zeros(SIDE, 3), txt_ids=torch.zeros(SEQ, 3),
        guidance=torch.ones(BATCH),
    )  # fmt: skip


BUILT = {
    "DiT": dit,
    "UNet2D": unet,
    "UNet2DCondition": conditional_unet,
    "AutoencoderKL": autoencoder,
    "SD3": sd3,
    "Flux": flux,
}
ENTRIES = {f"diffusers {name}": Entry(build, "diffusers") for name, build in BUILT.items()}

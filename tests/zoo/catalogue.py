"""All models of the zoo, by the name under which `docs/models.md` lists them."""

from __future__ import annotations

from tests.zoo import (
    adapters,
    diffusion,
    hugging_face,
    nano_gpt,
    seeing_and_hearing,
    traits,
    vision,
    x_transformers_models,
)
from tests.zoo.case import Entry

ZOO: dict[str, Entry] = {
    **hugging_face.ENTRIES,
    **seeing_and_hearing.ENTRIES,
    **diffusion.ENTRIES,
    **x_transformers_models.ENTRIES,
    **adapters.ENTRIES,
    **vision.ENTRIES,
    **nano_gpt.ENTRIES,
    **traits.ENTRIES,
}

OF_EACH_FAMILY = (
    "Hugging Face GPT-2",
    "diffusers UNet2D",
    "diffusers UNet2DCondition",
    "x-transformers decoder, dropout, grouped keys",
    "PEFT LoRA on Llama",
    "timm convnext_atto",
    "nanoGPT",
)
"""A part of the zoo that stands for all of it on other releases of torch, where all would take too
long: both attention U-Nets, and one of each other library.
"""

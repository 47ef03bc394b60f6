"""Small configurations of models of Hugging Face transformers and diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.zoo.case import Case, Entry, loss_of

VOCAB, WIDTH, LAYERS, HEADS, SEQ, BATCH = 128, 64, 2, 4, 32, 4


def _ids() -> Tensor:
    return torch.randint(VOCAB, (BATCH, SEQ))


def _causal(model: Any) -> Case:
    ids = _ids()
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return Case(model.train(), kwargs=kwargs, loss_fn=loss_of)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _causal(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_positions=SEQ, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
            )
        )
    )


def _decoder_sizes() -> dict[str, int]:
    return {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
        "max_position_embeddings": SEQ,
    }  # fmt: skip


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _causal(LlamaForCausalLM(LlamaConfig(**_decoder_sizes())))


def qwen3() -> Case:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _causal(Qwen3ForCausalLM(Qwen3Config(**_decoder_sizes(), head_dim=WIDTH // HEADS)))


def mistral() -> Case:
    from transformers import MistralConfig, MistralForCausalLM

    return _causal(MistralForCausalLM(MistralConfig(**_decoder_sizes(), sliding_window=16)))


def gemma() -> Case:
    from transformers import GemmaConfig, GemmaForCausalLM

    return _causal(GemmaForCausalLM(GemmaConfig(**_decoder_sizes(), head_dim=WIDTH // HEADS)))


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": SEQ,
    }  # fmt: skip
    ids, mask = _ids(), torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[:, SEQ // 2 :] = 0
    kwargs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return Case(BertForMaskedLM(BertConfig(**sizes)).train(), kwargs=kwargs, loss_fn=loss_of)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH, num_layers=LAYERS,
        num_heads=HEADS, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    kwargs = {"input_ids": _ids(), "labels": _ids(), "use_cache": False}
    return Case(T5ForConditionalGeneration(config).train(), kwargs=kwargs, loss_fn=loss_of)


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH, image_size=32, patch_size=8, num_labels=10,
    )  # fmt: skip
    kwargs = {
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": torch.randint(10, (BATCH,)),
    }
    return Case(ViTForImageClassification(config).train(), kwargs=kwargs, loss_fn=loss_of)


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_decoder_sizes(), num_local_experts=4, num_experts_per_tok=2)
    return _causal(MixtralForCausalLM(config))


def dit() -> Case:
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, in_channels=4,
        out_channels=4, num_layers=LAYERS, sample_size=16, patch_size=2, num_embeds_ada_norm=10,
    ).train()  # fmt: skip
    latents = torch.randn(BATCH, 4, 16, 16)
    kwargs = {
        "hidden_states": latents,
        "timestep": torch.randint(10, (BATCH,)),
        "class_labels": torch.randint(10, (BATCH,)),
        "return_dict": False,
    }
    return Case(model, kwargs=kwargs, loss_fn=_denoising, target=torch.randn_like(latents))


def _denoising(output: Any, target: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(output[0], target)


ENTRIES = {
    "Hugging Face GPT-2": Entry(gpt2, "transformers"),
    "Hugging Face Llama": Entry(llama, "transformers"),
    "Hugging Face Qwen3": Entry(qwen3, "transformers"),
    "Hugging Face Mistral": Entry(mistral, "transformers"),
    "Hugging Face Gemma": Entry(gemma, "transformers"),
    "Hugging Face BERT": Entry(bert, "transformers"),
    "Hugging Face T5": Entry(t5, "transformers"),
    "Hugging Face ViT": Entry(vit, "transformers"),
    "Hugging Face Mixtral": Entry(mixtral, "transformers"),
    "diffusers DiT": Entry(dit, "diffusers"),
}

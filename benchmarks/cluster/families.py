"""Models of transformers as clusters are planned for them: factories by name, without weights.

`opt_*` have the sizes of MPT in llm-foundry's table (layers, width, vocabulary, a tied head, fused
attention); MPT has no biases and positions by ALiBi.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _factory(kind: str, head: str = "AutoModelForCausalLM", **sizes: Any) -> Callable[..., Any]:
    def factory(batch: int = 1, seq: int = 2048) -> Any:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            model = getattr(transformers, head).from_config(config)
            ids = torch.zeros(batch, seq, dtype=torch.int64)
            pixels = torch.zeros(batch, 3, 224, 224)
        if "Image" in head:
            return model, (pixels,), {"labels": ids[:, 0]}
        return model, (), {"input_ids": ids, "labels": ids}

    return factory


def mixtral_8x7b_lora(batch: int = 1, seq: int = 2048) -> Any:
    """Frozen, with adapters at queries and values."""
    import peft

    model, args, kwargs = mixtral_8x7b(batch, seq)
    with torch.device("meta"):
        adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(model, adapters), args, kwargs


def _opt(layers: int, width: int, heads: int) -> Callable[..., Any]:
    return _factory(
        "opt", hidden_size=width, word_embed_proj_dim=width, ffn_dim=4 * width,
        num_hidden_layers=layers, num_attention_heads=heads, vocab_size=50368,
    )  # fmt: skip


opt_1b, opt_3b, opt_7b, opt_13b = (
    _opt(24, 2048, 16), _opt(32, 2560, 20), _opt(32, 4096, 32), _opt(40, 5120, 40)
)  # fmt: skip
hf_llama3_8b = _factory(
    "llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
qwen3_8b = _factory(
    "qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
gemma3_12b = _factory(
    "gemma3_text", vocab_size=262208, hidden_size=3840, intermediate_size=15360,
    num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
    sliding_window=1024,
)  # fmt: skip
gpt2_xl = _factory("gpt2", n_layer=48, n_embd=1600, n_head=25, n_positions=2048)
mixtral_8x7b = _factory("mixtral")
qwen2_moe_a2_7b = _factory(
    "qwen2_moe", num_hidden_layers=24, hidden_size=2048, num_attention_heads=16,
    num_key_value_heads=16, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    num_experts=60, num_experts_per_tok=4, vocab_size=151936,
)  # fmt: skip
qwen3_30b_a3b = _factory(
    "qwen3_moe", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768,
)  # fmt: skip
vit_huge = _factory(
    "vit", "AutoModelForImageClassification", hidden_size=1280, num_hidden_layers=32,
    num_attention_heads=16, intermediate_size=5120, patch_size=14,
)  # fmt: skip
bert_large = _factory(
    "bert", "AutoModelForMaskedLM", hidden_size=1024, num_hidden_layers=24,
    num_attention_heads=16, intermediate_size=4096, max_position_embeddings=2048,
)  # fmt: skip
t5_3b = _factory(
    "t5", "AutoModelForSeq2SeqLM", d_model=1024, d_ff=16384, num_layers=24, num_heads=32, d_kv=128,
    decoder_start_token_id=0,
)  # fmt: skip
bart_large = _factory("bart", "AutoModelForSeq2SeqLM", max_position_embeddings=2048)

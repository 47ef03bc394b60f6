"""Small language models of Hugging Face transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Entry, loss_of

VOCAB, WIDTH, LAYERS, HEADS, SEQ, BATCH = 128, 64, 2, 4, 32, 4

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": SEQ,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEAD_DIM = {"head_dim": WIDTH // HEADS}
GPT2 = {
    "vocab_size": VOCAB, "n_positions": SEQ, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
}  # fmt: skip
PAIRED = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": SEQ,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""Of an encoder and a decoder."""
T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 2 * WIDTH,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}

DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Qwen3": {**GROUPED, **HEAD_DIM},
    "Mistral": {**GROUPED, "sliding_window": 16},
    "Gemma": {**GROUPED, **HEAD_DIM},
    "Mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        **GROUPED, **HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
    },
    "GPTNeoX": {**SIZES, "hidden_dropout": 0.1},
    "Mamba": {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 8,
    },
}  # fmt: skip

MIXTURES = ("Mixtral", "Qwen3Moe")

MASKED: dict[str, dict[str, Any]] = {
    "BERT": SIZES,
    "ModernBERT": {
        **SIZES, "local_attention": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "Longformer": {**SIZES, "attention_window": 16, "max_position_embeddings": SEQ + 2},
}  # fmt: skip
_KINDS = {"BERT": "Bert", "ModernBERT": "ModernBert"}


def random_ids(low: int = 3) -> Tensor:
    """Tokens, none of them special."""
    return torch.randint(low, VOCAB, (BATCH, SEQ))


def named(kind: str, head: str, sizes: dict[str, Any]) -> nn.Module:
    """The model `kind` with a head, such as ``ForCausalLM``, of a configuration."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, kind + head)(config).train()


def _causal(model: nn.Module) -> Case:
    ids = random_ids()
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return Case(model, kwargs=kwargs, loss_fn=loss_of)


def decoder(kind: str) -> Case:
    """A language model that reads from left to right."""
    return _causal(named(kind, "ForCausalLM", DECODERS[kind]))


def gathered(kind: str) -> Case:
    """A mixture of experts, each of which gathers its tokens: how many depends on the data."""
    model: Any = named(kind, "ForCausalLM", DECODERS[kind])
    model.set_experts_implementation("eager")
    return _causal(model)


def gpt2() -> Case:
    """GPT-2, whose dropout draws."""
    return _causal(named("GPT2", "LMHeadModel", GPT2))


def checkpointed() -> Case:
    """A Llama that recomputes its layers itself, and sets hooks for it."""
    case = decoder("Llama")
    checkpoint(case.model)
    return case


def checkpoint(model: Any) -> None:
    """Have a model compute its layers again in backward, by the newest name there is for it."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)()
            return
    raise AttributeError(f"{type(model).__name__} has no checkpointing to switch on")


def masked(kind: str, *, is_padded: bool = False) -> Case:
    """A model that fills gaps, in texts that may be shorter than the batch."""
    model = named(_KINDS.get(kind, kind), "ForMaskedLM", MASKED[kind])
    ids = random_ids()
    kwargs = {"input_ids": ids, "labels": ids}
    if is_padded:
        mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
        mask[:, SEQ // 2 :] = 0
        kwargs["attention_mask"] = mask
    return Case(model, kwargs=kwargs, loss_fn=loss_of)


def pair(kind: str, sizes: dict[str, Any]) -> Case:
    """An encoder and a decoder."""
    model = named(kind, "ForConditionalGeneration", sizes)
    kwargs = {"input_ids": random_ids(), "labels": random_ids(), "use_cache": False}
    return Case(model, kwargs=kwargs, loss_fn=loss_of)


t5 = functools.partial(pair, "T5", T5)

BUILT = {
    "GPT-2": gpt2,
    **{kind: functools.partial(decoder, kind) for kind in DECODERS},
    "Llama, gradient checkpointing": checkpointed,
    "BERT": functools.partial(masked, "BERT"),
    "BERT, padded": functools.partial(masked, "BERT", is_padded=True),
    "ModernBERT": functools.partial(masked, "ModernBERT"),
    "T5": t5,
    "BART": functools.partial(pair, "Bart", PAIRED),
}
ENTRIES = {
    **{f"Hugging Face {name}": Entry(build, "transformers") for name, build in BUILT.items()},
    **{
        f"Hugging Face {kind}, gathered experts": Entry(
            functools.partial(gathered, kind), "transformers", refused="a mask decides how many"
        )
        for kind in MIXTURES
    },
    "Hugging Face Longformer, padded": Entry(
        functools.partial(masked, "Longformer", is_padded=True),
        "transformers",
        refused=r"(?s)leave kwargs\['attention_mask'\] out.*values of kwargs\['attention_mask'\]",
    ),
}

"""Small models of x-transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tests.zoo.case import Case, Entry, labelled

VOCAB, WIDTH, SEQ, BATCH = 64, 64, 32, 2
SIZES = {"dim": WIDTH, "depth": 2, "heads": 4, "attn_dim_head": 16}

DECODERS: dict[str, dict[str, Any]] = {
    "flash, rotary": {"attn_flash": True, "rotary_pos_emb": True},
    "dropout, grouped keys": {"attn_dropout": 0.1, "ff_dropout": 0.1, "attn_kv_heads": 2},
    "swiglu, RMS norm": {
        "ff_glu": True, "ff_swish": True, "use_rmsnorm": True, "ff_no_bias": True,
    },
    "bias of T5": {"rel_pos_bias": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
}  # fmt: skip
REFUSED = {
    "bias of T5": r"(?s)change global registry of einx.*leave the module that does it to eager",
    "alibi": r"puts another tensor in the place of attn_layers\.rel_pos\.bias",
}


def decoder(**options: Any) -> Case:
    """A language model with some of the library's options."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(**SIZES, **options)
    model = TransformerWrapper(num_tokens=VOCAB, max_seq_len=SEQ, attn_layers=layers)
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    return Case(model.train(), (ids,), loss_fn=_next, target=ids)


def _next(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])


def vit() -> Case:
    """A classifier of images."""
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(**SIZES)
    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=layers)
    return labelled(model.train(), 32)


BUILT = {
    **{f"decoder, {name}": functools.partial(decoder, **given) for name, given in DECODERS.items()},
    "ViT": vit,
}
ENTRIES = {
    f"x-transformers {name}": Entry(
        build, "x_transformers", refused=REFUSED.get(name.removeprefix("decoder, "), "")
    )
    for name, build in BUILT.items()
}

"""Models as people bring them: small ones of transformers, and chains whose blocks differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cluster_models import token_loss
from tests.remat.cluster.capture.chains import Model, Plain, in_turn

Factory = Callable[..., Any]


def _transformers(kind: str, **sizes: Any) -> Factory:
    """A factory of a small model with a config of that kind, and its own loss."""

    def factory(batch: int = 1, seq: int = 32) -> Any:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        head = {
            "vit": transformers.AutoModelForImageClassification,
            "bert": transformers.AutoModelForMaskedLM,
        }.get(kind, transformers.AutoModelForCausalLM)
        if config.is_encoder_decoder:
            head = transformers.AutoModelForSeq2SeqLM
        with torch.device("meta"):
            model = head.from_config(config)
            ids = torch.zeros(batch, seq, dtype=torch.int64)
        if kind != "vit":
            return model, (), {"input_ids": ids, "labels": ids}
        pixels = torch.zeros(batch, 3, 32, 32, device="meta")
        return model, (pixels,), {"labels": ids[:, 0]}

    return factory


_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 96,
}  # fmt: skip
_KV = {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
gemma3_text = _transformers(
    "gemma3_text", **_SMALL, **_KV, sliding_window=8,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip
qwen3_moe = _transformers("qwen3_moe", **_SMALL, **_KV, **_EXPERTS, mlp_only_layers=[0])
qwen3_moe_alike = _transformers("qwen3_moe", **_SMALL, **_KV, **_EXPERTS)


def qwen3_adapted(batch: int = 1, seq: int = 32) -> Any:
    """Inside of what peft wraps around a model, whose forward names no cache."""
    import peft

    model, args, kwargs = qwen3_moe_alike(batch, seq)
    with torch.device("meta"):
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])), args, kwargs


vit = _transformers("vit", **_SMALL, image_size=32, patch_size=8)
bert = _transformers("bert", **_SMALL)
t5 = _transformers(
    "t5", d_model=64, d_ff=128, num_layers=3, num_heads=4, d_kv=16, vocab_size=96,
    decoder_start_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
bart = _transformers(
    "bart", d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_layers=3,
    decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=96,
    max_position_embeddings=64,
)  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def _changed(change: Callable[[Model], object]) -> Factory:
    """A chain of `Plain` blocks that `change` has been at."""

    def factory(batch: int = 1, seq: int = 8) -> dict[str, Any]:
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        model = Model(in_turn, False, Plain)
        change(model)
        return {"model": model, "args": (ids,), "loss_fn": token_loss, "target": ids}

    return factory


def _adapt(model: Model, begin: int = 0) -> None:
    model.requires_grad_(False)
    for layer in model.layers[begin:]:
        layer.up = Adapted(layer.up)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


adapted = _changed(_adapt)
adapted_late = _changed(lambda model: _adapt(model, 1))
frozen_head = _changed(lambda model: model.head.requires_grad_(False))
frozen = _changed(lambda model: model.requires_grad_(False))
unlike = _changed(lambda model: _widen(model.layers[0]))


def _widen(block: nn.Module) -> None:
    assert isinstance(block, Plain)
    block.up, block.down = nn.Linear(16, 128), nn.Linear(128, 16)


class _Masked(Plain):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(x) * mask


class _Given(Model):
    """Whose blocks are given what `make` makes of the model and its batch."""

    def __init__(self, make: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__(in_turn, False, _Masked)
        self.make = make

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        mask = self.make(self, ids).to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def given(make: Callable[[Model, Tensor], Tensor]) -> Factory:
    def factory(batch: int = 1, seq: int = 8) -> dict[str, Any]:
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        return {"model": _Given(make), "args": (ids,), "loss_fn": token_loss, "target": ids}

    return factory


padded = given(lambda model, ids: (ids > 3)[..., None])


class _Loose(Model):
    """With parameters of its own, a counter, a projection, and blocks that return tuples."""

    def __init__(self) -> None:
        super().__init__(in_turn, False, Plain)
        self.positions, self.scale = nn.Parameter(torch.zeros(64, 16)), nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.project = nn.Linear(16, 16)
        self.layers = nn.ModuleList(_Pair() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        self.count += 1
        x = self.project(self.tok(ids)) * self.scale + self.positions[: ids.shape[1]]
        keep = functional.one_hot(ids % 2, 2)[..., :1].to(x.dtype)
        for i, layer in enumerate(self.layers):
            x, _ = layer(hidden=x, keep=keep, rate=float(i))
        return self.head(self.norm(x) * self.scale)


class _Pair(Plain):
    def forward(self, hidden: Tensor, keep: Tensor, rate: float) -> Any:  # pyright: ignore
        return super().forward(hidden) * keep + rate, None


def loose(batch: int = 1, seq: int = 8) -> dict[str, Any]:
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return {"model": _Loose(), "args": (ids,), "loss_fn": token_loss, "target": ids}


def looks_at_values(batch: int = 1, seq: int = 8) -> dict[str, Any]:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return token_loss(logits, ids) * (2 if ids.sum().item() > 3 else 1)

    return {**_changed(lambda _: None)(batch, seq), "loss_fn": loss}


def one_sequence(batch: int = 1, seq: int = 8) -> dict[str, Any]:
    """Whatever is asked for."""
    return _changed(lambda _: None)(1, seq)


class _Wired(Plain):
    """Adds to what it reads, or to the norm of that: the same operations on other tensors."""

    adds_to_norm = False

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        normed = self.norm(x)
        made = scale * self.down(functional.gelu(self.up(normed)))
        return (normed if self.adds_to_norm else x) + made


def _rewire(model: Model) -> None:
    model.layers = nn.ModuleList(_Wired() for _ in range(3))
    model.layers[2].adds_to_norm = True  # pyright: ignore[reportArgumentType]


rewired = _changed(_rewire)

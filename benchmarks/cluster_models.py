"""Models of published cluster jobs, as a user would write them, in the sizes of the papers.

GPT as in Megatron-LM (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, table 3): open
attention with dropout. Llama 3 (2024, https://arxiv.org/abs/2407.21783, table 3) and Llama in the
sizes of Yuan et al. (2024, https://www.usenix.org/conference/atc24/presentation/yuan): fused
attention, no dropout. Factories are named as `remat cluster` takes them, such as
``benchmarks.cluster_models:gpt_175b``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import llama


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    is_llama: bool


class OpenAttention(nn.Module):
    """Attention by products, softmax and dropout, as Megatron-LM ran it in 2022."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.features = sizes.width // sizes.heads
        self.q, self.k, self.v = (nn.Linear(sizes.width, sizes.width) for _ in range(3))
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, seq, width], to the same shape."""
        batch, seq, _ = x.shape
        q, k, v = (
            layer(x).view(batch, seq, -1, self.features).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(self.features), -1)
        y = functional.dropout(scores, 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class GptLayer(nn.Module):
    """Attention and a perceptron, each normed before, dropped and added after."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.norm_attn, self.norm_mlp = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attn = OpenAttention(sizes)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, seq, width], to the same shape."""
        x = x + functional.dropout(self.attn(self.norm_attn(x)), 0.1, self.training)
        h = self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return x + functional.dropout(h, 0.1, self.training)


def _llama_layer(sizes: ModelSizes) -> nn.Module:
    names = ("width", "heads", "kv_heads", "hidden")
    return llama.Block(llama.Sizes(**{name: getattr(sizes, name) for name in names}))


class Decoder(nn.Module):
    """Token ids to the logits of the next token."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        layer = _llama_layer if sizes.is_llama else GptLayer
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(layer(sizes) for _ in range(sizes.layers))
        self.norm = (nn.RMSNorm if sizes.is_llama else nn.LayerNorm)(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids, [batch, seq], to logits, [batch, seq, vocab]."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross entropy of each token, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def factory_for(sizes: ModelSizes) -> Callable[..., dict[str, Any]]:
    """A factory of that model."""

    def factory(batch: int = 1, seq: int = 2048) -> dict[str, Any]:
        with torch.device("meta"):
            model = Decoder(sizes).to(torch.bfloat16)
            ids = torch.zeros(batch, seq, dtype=torch.int64)
        return {"model": model, "args": (ids,), "loss_fn": token_loss, "target": ids}

    return factory


def _gpt(layers: int, width: int, heads: int) -> Callable[..., dict[str, Any]]:
    return factory_for(ModelSizes(layers, width, heads, heads, 4 * width, 51200, False))


def _llama(
    layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int = 128256
) -> Callable[..., dict[str, Any]]:
    return factory_for(ModelSizes(layers, width, heads, kv_heads, hidden, vocab, True))


gpt_22b = _gpt(48, 6144, 64)
gpt_175b = _gpt(96, 12288, 96)
gpt_530b = _gpt(105, 20480, 128)
gpt_1t = _gpt(128, 25600, 160)
llama3_8b = _llama(32, 4096, 32, 8, 14336)
llama3_70b = _llama(80, 8192, 64, 8, 28672)
llama3_405b = _llama(126, 16384, 128, 8, 53248)
llama_175b = _llama(96, 12288, 96, 96, 32768, 32000)

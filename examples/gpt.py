"""A small GPT with dropout, in the form that `remat run examples/gpt.py:factory` takes.

The defaults are those of a character-level GPT: 6 layers, width 384, 6 heads, about 10
million parameters. Sizes come from the environment: GPT_LAYERS, GPT_WIDTH, GPT_HEADS,
GPT_SEQ, GPT_BATCH, GPT_VOCAB, GPT_DROPOUT.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its batch."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    seq: int = 256
    batch: int = 4
    vocab: int = 1024
    dropout: float = 0.1

    @classmethod
    def from_environment(cls) -> Sizes:
        """The defaults, each replaced by its GPT_ variable where that is set."""
        names = ("layers", "width", "heads", "seq", "batch", "vocab")
        given = {name: os.environ.get(f"GPT_{name.upper()}") for name in names}
        whole = {name: int(text) for name, text in given.items() if text}
        return cls(**whole, dropout=float(os.environ.get("GPT_DROPOUT") or cls.dropout))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x``, [batch, seq, width]."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        p = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normed before and added after."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(sizes.width)
        self.attn = Attention(sizes)
        self.norm_mlp = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.GELU(),
            nn.Linear(4 * sizes.width, sizes.width),
        )
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, seq, width], to the same shape."""
        x = x + self.dropout(self.attn(self.norm_attn(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Decoder-only transformer whose token embedding is also its output layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.width)
        self.position = nn.Embedding(sizes.seq, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.apply(_init)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of predicting ``targets`` from ``tokens``, both [batch, seq]."""
        position = self.position.weight[: tokens.shape[1]]
        x = self.dropout(self.token(tokens) + position)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def factory(batch: int | None = None, sequence: int | None = None) -> dict[str, Any]:
    """The model and one batch of random tokens; the caller's RNG is left as it was."""
    sizes = Sizes.from_environment()
    sizes = replace(sizes, batch=batch or sizes.batch, seq=sequence or sizes.seq)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(sizes)
        tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return {"model": model, "args": (inputs, targets)}

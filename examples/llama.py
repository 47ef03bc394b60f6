"""A Llama in the sizes of Llama 3 8B, in bfloat16 and without storage, to plan for a GPU.

`remat run examples/llama.py:factory --device h100` needs no GPU, and no room for the weights:
they are on the meta device. Sizes come from the environment: LLAMA_LAYERS, LLAMA_WIDTH,
LLAMA_HEADS, LLAMA_KV_HEADS, LLAMA_HIDDEN, LLAMA_SEQ, LLAMA_BATCH, LLAMA_VOCAB. LLAMA_DEVICE=cpu
gives the weights storage.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its batch; the defaults are those of Llama 3 8B."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    seq: int = 8192
    batch: int = 1
    vocab: int = 128256

    @classmethod
    def from_environment(cls) -> Sizes:
        """The defaults, each replaced by its LLAMA_ variable where that is set."""
        given = {field.name: os.environ.get(f"LLAMA_{field.name.upper()}") for field in fields(cls)}
        return cls(**{name: int(text) for name, text in given.items() if text})


class RotaryEmbedding(nn.Module):
    """Rotates pairs of features by an angle that grows with the position."""

    def __init__(self, features: int, base: float = 500_000.0) -> None:
        super().__init__()
        exponents = torch.arange(0, features, 2, dtype=torch.float32) / features
        self.register_buffer("frequencies", 1.0 / base**exponents, persistent=False)
        self.frequencies: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, heads, seq, features], to the same shape."""
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention whose key and value heads are shared by groups of query heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.group = sizes.heads // sizes.kv_heads
        self.features = sizes.width // sizes.heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, sizes.kv_heads * self.features, bias=False)
        self.v = nn.Linear(sizes.width, sizes.kv_heads * self.features, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.rotary = RotaryEmbedding(self.features)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x``, [batch, seq, width]."""
        batch, seq, _ = x.shape
        # A tensor parallel rank has a part of the heads, so their number is not named.
        q = self.q(x).view(batch, seq, -1, self.features).transpose(1, 2)
        k = self.k(x).view(batch, seq, -1, self.features).transpose(1, 2)
        v = self.v(x).view(batch, seq, -1, self.features).transpose(1, 2)
        k = self.rotary(k).repeat_interleave(self.group, dim=1)
        v = v.repeat_interleave(self.group, dim=1)
        y = functional.scaled_dot_product_attention(self.rotary(q), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    """Attention and a gated perceptron, each normed before and added after."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_attn = nn.RMSNorm(sizes.width, eps=1e-5)
        self.attn = Attention(sizes)
        self.norm_mlp = nn.RMSNorm(sizes.width, eps=1e-5)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, seq, width], to the same shape."""
        x = x + self.attn(self.norm_attn(x))
        h = self.norm_mlp(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Token ids to the logits of the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids, [batch, seq], to logits, [batch, seq, vocab]."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross entropy of each next token, in float32."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def factory(batch: int | None = None, sequence: int | None = None) -> dict[str, Any]:
    """The model and a batch of random ids, as `remat run` takes them."""
    sizes = Sizes.from_environment()
    sizes = replace(sizes, batch=batch or sizes.batch, seq=sequence or sizes.seq)
    with torch.device(os.environ.get("LLAMA_DEVICE") or "meta"):
        model = Llama(sizes).to(torch.bfloat16)
    ids = torch.randint(sizes.vocab, (sizes.batch, sizes.seq))
    return {"model": model, "args": (ids,), "loss_fn": next_token_loss, "target": ids}

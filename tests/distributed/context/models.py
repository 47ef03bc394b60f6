"""Decoders with causal attention, which know positions in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.pipeline.models import VOCAB, token_loss

WIDTH, HEADS, KEYS, HEAD, LAYERS, SEQ = 64, 4, 2, 16, 4, 64
Rotation = tuple[Tensor, Tensor]


def rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    if rotation is None:
        return x
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rotation_of(tokens: int, like: Tensor) -> Rotation:
    """Cosines and sines, each of [tokens, head width]."""
    rates = 100.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(tokens), rates).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Block(nn.Module):
    """Attention with two heads of keys, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KEYS * HEAD), nn.Linear(WIDTH, KEYS * HEAD)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        x = x + self.out(self.attention(self.norm(x), rotation))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))

    def attention(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, -1, HEAD).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = self.mixed(rotated(q, rotation), rotated(k, rotation), v)
        return y.transpose(1, 2).reshape(batch, tokens, -1)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


class FewHeads(Block):
    """With so many heads of queries, and one of keys."""

    queries = 2

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, self.queries * HEAD)
        self.out = nn.Linear(self.queries * HEAD, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, HEAD), nn.Linear(WIDTH, HEAD)


class OneHead(FewHeads):
    queries = 1


class OwnRotation(Block):
    """Makes positions from the number of tokens that it reads."""

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        return super().forward(x, rotation_of(x.shape[1], x))


class Convolved(Block):
    """Each token reads the one before it."""

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        return super().forward(x + functional.pad(x, (0, 0, 1, -1)), rotation)


class OpenAttention(Block):
    """Attention by two products."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // KEYS, 1) for t in (k, v))
        return (q @ k.transpose(2, 3)).softmax(-1) @ v


class Masked(Block):
    """Causal by a mask of its own."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )


class Decoder(nn.Module):
    """Token ids to logits. Blocks are given rotations of all tokens."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): block() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        rotation = rotation_of(ids.shape[1], x)
        for layer in self.layers.values():
            x = layer(x, rotation=rotation)
        return self.head(self.norm(x))


class Learned(Decoder):
    """Adds a learned vector for each position before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Embedding(SEQ, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def shifted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Of the next token: the last one has no target."""
    return token_loss(logits[:, :-1], ids[:, 1:].contiguous())


def pooled_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Of the mean over tokens."""
    return class_loss(logits, ids[:, 0])


def class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """The same with one target for each sequence."""
    return functional.cross_entropy(logits.float().mean(1), classes)


def factory_of(model: Callable[[], nn.Module]) -> Callable[..., dict[str, Any]]:
    """A factory as `remat cluster` takes it."""

    def factory(batch: int = 1, seq: int = SEQ) -> dict[str, Any]:
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        return {"model": model(), "args": (ids,), "loss_fn": token_loss, "target": ids}

    return factory


def few_heads() -> nn.Module:
    return Decoder(FewHeads)


def one_head() -> nn.Module:
    return Decoder(OneHead)


rotary, learned = factory_of(Decoder), factory_of(Learned)
few, one = factory_of(few_heads), factory_of(one_head)

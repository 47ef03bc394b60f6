"""A GPT as people write it in one file, after nanoGPT: model and loss in one forward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, Entry


@dataclass
class Config:
    """Sizes, and what is switched on."""

    block_size: int = 32
    vocab_size: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    dropout: float = 0.1
    bias: bool = False


class CausalSelfAttention(nn.Module):
    """Attention to what stands before."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.flash = hasattr(functional, "scaled_dot_product_attention")

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.c_attn(x).split(width, dim=2)
        q, k, v = (
            t.view(rows, length, self.config.heads, width // self.config.heads).transpose(1, 2)
            for t in split
        )
        dropout = self.config.dropout if self.training else 0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(rows, length, width)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two layers for each token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(functional.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention and a network, each behind a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Embeddings that are tied to the head, blocks, and the loss where targets are given."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.block_size, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, bias=config.bias)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        length = idx.shape[1]
        assert length <= self.config.block_size
        positions = torch.arange(0, length, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, functional.cross_entropy(flat, targets.view(-1), ignore_index=-1)


def _loss_of_pair(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[1]


def nano_gpt() -> Case:
    """The model with a batch of random tokens."""
    config = Config()
    ids = torch.randint(config.vocab_size, (4, config.block_size))
    return Case(NanoGPT(config), (ids, ids.roll(-1, 1)), loss_fn=_loss_of_pair)


ENTRIES = {"nanoGPT": Entry(nano_gpt)}

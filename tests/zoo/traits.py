"""Models of torch alone that have what users' models have: routing, adapters, odd gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models import make
from tests.zoo.case import Case, Entry, classes

WIDTH, SEQ, BATCH, VOCAB = 64, 16, 4, 50


def transformer() -> Case:
    model = nn.Transformer(
        WIDTH, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, batch_first=True
    )
    mask = nn.Transformer.generate_square_subsequent_mask(SEQ)
    pair = torch.randn(BATCH, SEQ, WIDTH), torch.randn(BATCH, SEQ, WIDTH)
    return Case(model, pair, {"tgt_mask": mask, "tgt_is_causal": True}, _squared)


def _squared(output: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return first.square().mean()


def lstm() -> Case:
    return Case(nn.LSTM(WIDTH, WIDTH, 2), (torch.randn(SEQ, BATCH, WIDTH),), loss_fn=_squared)


def gru() -> Case:
    return Case(nn.GRU(WIDTH, WIDTH), (torch.randn(SEQ // 2, BATCH, WIDTH),), loss_fn=_squared)


class Experts(nn.Module):
    """Routes each token to the best two of its experts; all run, masked, in static shapes."""

    def __init__(self, n_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, n_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(n_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, weights)
        return x + sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def experts() -> Case:
    model = nn.Sequential(Experts(), nn.LayerNorm(WIDTH), Experts())
    return Case(model, (torch.randn(BATCH, SEQ, WIDTH),), loss_fn=_squared)


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class GPT(nn.Module):
    """With tied weights, and `checkpoint()` around each block where asked."""

    def __init__(self, layers: int = 3, *, is_checkpointed: bool = False, **embedding: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, **embedding)
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.is_checkpointed = is_checkpointed
        if not embedding:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x).flatten(0, 1)


def _language(model: nn.Module, autocast: torch.dtype | None = None) -> Case:
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    return Case(model, (ids,), loss_fn=classes, target=ids.flatten(), autocast=autocast)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapters() -> Case:
    model = GPT().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LowRank(block.qkv), LowRank(block.out)
    return _language(model)


class Odd(nn.Module):
    """Keyword arguments, a nested output with None in it, a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, *, scale: float, bias: Tensor | None = None) -> dict[str, Any]:
        y = functional.gelu(self.first(x)) * scale
        y = y if bias is None else y + bias
        return {"out": (self.second(y), None), "hidden": [y]}


def odd() -> Case:
    kwargs = {"scale": 0.5, "bias": torch.randn(WIDTH)}
    return Case(Odd(), (torch.randn(32, WIDTH),), kwargs, _loss_of_odd)


def _loss_of_odd(output: dict[str, Any]) -> Tensor:
    return output["out"][0].square().mean() + output["hidden"][0].mean()


def _known(name: str) -> Entry:
    """A case of the exactness tests."""

    def build() -> Case:
        return Case(*make(name))

    return Entry(build)


ENTRIES = {
    "nn.Transformer": Entry(transformer),
    "nn.LSTM": Entry(lstm, refused="nn.LSTMCell"),
    "nn.GRU": Entry(gru),
    "unrolled LSTM cells": _known("lstm_cells"),
    "mixture of experts, top 2": Entry(experts),
    "GPT with tied weights": Entry(lambda: _language(GPT())),
    "GPT under bf16 autocast": Entry(lambda: _language(GPT(), torch.bfloat16)),
    "GPT under fp16 autocast": Entry(lambda: _language(GPT(), torch.float16)),
    "GPT with checkpoint() calls": Entry(lambda: _language(GPT(is_checkpointed=True))),
    "GPT with sparse embeddings": Entry(lambda: _language(GPT(sparse=True)), refused="sparse"),
    "GPT with low-rank adapters": Entry(adapters),
    "custom autograd.Function": _known("custom_function"),
    "in-place ops on views": _known("in_place_views"),
    "kwargs, nested and None outputs, unused parameter": Entry(odd),
    "frozen parameters": _known("frozen_parameters"),
}

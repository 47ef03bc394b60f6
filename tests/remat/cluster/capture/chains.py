"""Small chains of blocks, and models that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cluster_models import ModelSizes, factory_for, token_loss

SMALL = ModelSizes(4, 64, 4, 2, 128, 96, True)
SMALL_GPT = ModelSizes(4, 64, 4, 4, 256, 96, False)
small_llama = factory_for(SMALL)
small_gpt = factory_for(SMALL_GPT)


class Plain(nn.Module):
    """Two linear layers, with whatever lies between two blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks that `run` calls, and a head."""

    def __init__(
        self, run: Callable[[Model, Tensor], Tensor], tied: bool, block: type[nn.Module]
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.tok.weight
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self, self.tok(ids))))


def in_turn(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def with_skip(model: Model, x: Tensor) -> Tensor:
    """What the first block makes is read by the last one's side too."""
    first = model.layers[0](x)
    return model.layers[2](model.layers[1](first)) + first


def scaled_between(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * 2
    return x


def backwards(model: Model, x: Tensor) -> Tensor:
    for layer in reversed(list(model.layers)):
        x = layer(x)
    return x


def other_arguments(model: Model, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, float(i))
    return x


class ByNumber(nn.Module):
    """Attention whose views name the number of heads, so it runs with all of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, seq, 16))


def made(
    run: Callable[[Model, Tensor], Tensor] = in_turn, *, tied: bool = False,
    block: type[nn.Module] = Plain,
) -> Callable[..., dict[str, Any]]:  # fmt: skip
    """A factory of a model of `Plain` blocks."""

    def factory(batch: int = 1, seq: int = 8) -> dict[str, Any]:
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        model = Model(run, tied, block)
        return {"model": model, "args": (ids,), "loss_fn": token_loss, "target": ids}

    return factory


chain, skip, scaled, turned, unlike = (
    made(run) for run in (in_turn, with_skip, scaled_between, backwards, other_arguments)
)
tied_chain, by_number = made(tied=True), made(block=ByNumber)


class Generates(Model):
    """As in transformers: a cache for generation, a look at a mask's values, and its own loss."""

    def __init__(self) -> None:
        super().__init__(in_turn, tied=False, block=Plain)

    def forward(self, ids: Tensor, labels: Tensor, use_cache: bool = True) -> Tensor:
        if not torch.compiler.is_compiling() and bool(torch.diff(ids).any()):
            raise ValueError("the values of the batch were looked at")
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x, scale=object()) if use_cache else layer(x)
        logits = self.head(self.norm(x)[:, slice(0, None), :])
        return functional.cross_entropy(logits.view(-1, 32), labels.view(-1))


def generating(batch: int = 2, seq: int = 8) -> dict[str, Any]:
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return {"model": Generates(), "args": (ids, ids), "loss_fn": None, "target": None}

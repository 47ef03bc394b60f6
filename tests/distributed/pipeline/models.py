"""Chains of blocks for pipelines, as factories that a cluster is planned with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional

WIDTH, VOCAB, LAYERS = 64, 48, 8


class Block(nn.Module):
    """A residual block of two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """An embedding, blocks, and a head whose loss is a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.out(self.norm(x))


class Skips(Decoder):
    """What the first block makes is read behind the last one too."""

    def forward(self, ids: Tensor) -> Tensor:
        first, *others = self.layers.values()
        x = kept = first(self.tok(ids))
        for layer in others:
            x = layer(x)
        return self.out(self.norm(x + kept))


class Masks(Decoder):
    """Blocks are given a number for each token, which is computed from the batch."""

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.tok(ids), (ids > 3).unsqueeze(-1).to(torch.bfloat16)
        for layer in self.layers.values():
            x = layer(x, mask)
        return self.out(self.norm(x))


class MaskedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * mask


def masked() -> nn.Module:
    made = Masks()
    made.layers = nn.ModuleDict({str(i): MaskedBlock() for i in range(LAYERS)})
    return made.to(torch.bfloat16)


def tensor_plan() -> dict[str, Any]:
    """Borders are split along the sequence; the head gathers it."""
    return {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def draws(path: str, module: nn.Module) -> None:
    """Gives each rank other values."""
    torch.manual_seed(dist.get_rank())
    module.to_empty(device="cpu")
    for p in module.parameters():
        p.detach().normal_()


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def decoder(batch: int = 1, seq: int = 32) -> dict[str, Any]:
    """A factory as `remat cluster` takes it."""
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return {"model": Decoder(), "args": (ids,), "loss_fn": token_loss, "target": ids}

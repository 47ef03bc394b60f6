"""Decoders that give their blocks something made anew in each step, and losses of many kinds."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.context.models import Block as AttentionBlock
from tests.distributed.context.models import Rotation, rotation_of
from tests.distributed.pipeline.models import VOCAB, WIDTH, Block, token_loss

LAYERS, SEQ, IGNORED = 4, 32, -100
Makes = Callable[["Given", Tensor, Tensor], tuple[Any, ...]]


class GivenBlock(Block):
    """A residual block whose branch is masked and scaled."""

    def forward(self, x: Tensor, mask: Any = 1.0, alpha: Any = 1.0) -> Tensor:
        return x + alpha * (super().forward(x) - x) * mask


class Given(nn.Module):
    """`makes` : what the blocks are given, of the model, the ids and the embedding."""

    def __init__(self, makes: Makes = lambda *_: ()) -> None:
        super().__init__()
        self.tok, self.gate = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self.layers = nn.ModuleDict({str(i): GivenBlock() for i in range(LAYERS)})
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.makes, self.alpha, self.temperature, self.calls = makes, 0.5, 1.0, 0
        self.config = types.SimpleNamespace(scale=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.dropout(self.tok(ids), 0.1, self.training)
        given = self.makes(self, ids, x)
        for layer in self.layers.values():
            x = layer(x, *given)
        return self.out(self.norm(x)) / self.temperature * self.config.scale

    def count(self) -> int:
        self.calls += 1
        return self.calls


MAKES: dict[str, Makes] = {
    "drawn": lambda _, ids, x: ((torch.rand(WIDTH) > 0.5).to(x.dtype),),
    "drawn_bool": lambda _, ids, x: (torch.rand(*ids.shape, 1) > 0.2,),
    "padding": lambda _, ids, x: ((ids > 3).unsqueeze(-1),),
    "positions": lambda _, ids, x: ((torch.arange(ids.shape[1]) / SEQ).to(x.dtype)[:, None],),
    "moved": lambda model, ids, x: (torch.full((WIDTH,), model.alpha, dtype=x.dtype),),
    "rate": lambda model, ids, x: (1.0, model.alpha),
    "counted": lambda model, ids, x: (1.0, 1.0 / (1.5 + model.count())),
    "learned": lambda model, ids, x: (torch.sigmoid(model.gate.weight),),
    "gated": lambda model, ids, x: (torch.sigmoid(model.gate(x)), model.alpha),
}


class Attends(nn.Module):
    """Token ids to logits, with attention over all tokens; rotations go to blocks with a rate."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): Scaled() for i in range(LAYERS)})
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.alpha = self.temperature = 0.5
        self.config = types.SimpleNamespace(scale=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        rotation = rotation_of(ids.shape[1], x)
        for layer in self.layers.values():
            x = layer(x, rotation, self.alpha)
        return self.out(self.norm(x)) / self.temperature * self.config.scale


class Scaled(AttentionBlock):
    def forward(self, x: Tensor, rotation: Rotation | None = None, alpha: float = 1.0) -> Tensor:
        return x + alpha * (super().forward(x, rotation) - x)


def _flat(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1).float()


def masked_by_hand(logits: Tensor, ids: Tensor) -> Tensor:
    kept = ids != IGNORED
    each = functional.cross_entropy(_flat(logits), ids.flatten().clamp(min=0), reduction="none")
    return (each * kept.flatten()).sum() / kept.sum()


def picked(logits: Tensor, ids: Tensor) -> Tensor:
    each = functional.cross_entropy(_flat(logits), ids.flatten(), reduction="none")
    return each[ids.flatten() != IGNORED].mean()


def of_two(logits: Tensor, ids: Tensor) -> Tensor:
    """Beside the cross entropy, a penalty of large logits over all tokens."""
    return token_loss(logits, ids) + 0.01 * logits.float().logsumexp(-1).square().mean()


class Weighted(nn.Module):
    """Classes count differently, and targets are smoothed."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(3)
        self.register_buffer("weight", torch.rand(VOCAB, generator=stream))
        self.how = how

    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return functional.cross_entropy(_flat(logits), ids.flatten(), self.weight, **self.how)


class Learned(nn.Module):
    """With a temperature and a bias of each class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return functional.cross_entropy(_flat(logits) * self.temperature + self.bias, ids.flatten())


LOSSES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "mean": lambda: token_loss,
    "sum": lambda: lambda out, ids: 1e-2 * functional.cross_entropy(
        _flat(out), ids.flatten(), reduction="sum"
    ),
    "by_hand": lambda: masked_by_hand,
    "picked": lambda: picked,
    "two": lambda: of_two,
    "weighted": Weighted,
    "smoothed": lambda: Weighted(label_smoothing=0.1),
    "learned": Learned,
}  # fmt: skip


def given(batch: int = 1, seq: int = SEQ) -> dict[str, Any]:
    """A factory as `remat cluster` takes it."""
    return _factory(Given(), batch, seq)


def attends(batch: int = 1, seq: int = SEQ) -> dict[str, Any]:
    return _factory(Attends(), batch, seq)


def _factory(model: nn.Module, batch: int, seq: int) -> dict[str, Any]:
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return {"model": model, "args": (ids,), "loss_fn": token_loss, "target": ids}

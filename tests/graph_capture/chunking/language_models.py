"""Small language models whose linear head and loss may run in chunks, or may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

N_CLASSES, WIDTH = 300, 24
Loss = Callable[[Tensor, Tensor], Any]


class LanguageModel(nn.Module):
    """An embedding, a layer and a head; `loss` takes logits (batch, time, classes) and targets."""

    def __init__(
        self, loss: Loss, *, bias: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, N_CLASSES, bias=bias)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("class_weight", torch.rand(N_CLASSES))
        self.loss = loss
        self.to(dtype)

    def forward(self, tokens: Tensor, target: Tensor) -> Any:
        hidden = self.dropout(torch.tanh(self.layer(self.embedding(tokens))))
        return self.loss(self.head(hidden), target)


def batch(rows: int = 6, columns: int = 20) -> tuple[Tensor, Tensor]:
    tokens, target = (torch.randint(N_CLASSES, (rows, columns)) for _ in range(2))
    target[torch.rand(rows, columns) < 0.1] = -100
    return tokens, target


def plain(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def upcast(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().view(-1, N_CLASSES), target.view(-1))


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    """As language models of public libraries do."""
    ahead = logits[..., :-1, :].contiguous().float()
    return functional.cross_entropy(
        ahead.view(-1, N_CLASSES), target[..., 1:].contiguous().view(-1)
    )


def summed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / 7


def each(logits: Tensor, target: Tensor) -> Tensor:
    losses = functional.cross_entropy(
        logits[1:-1].flatten(0, 1),
        target[1:-1].clamp(min=3).flatten(),
        reduction="none",
        ignore_index=3,
    )
    return (losses * torch.arange(len(losses))).mean()


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), label_smoothing=0.1
    )


SPLIT: dict[str, tuple[Loss, dict[str, Any]]] = {
    "plain": (plain, {}),
    "with_bias": (plain, {"bias": True}),
    "shifted": (shifted, {"bias": True}),
    "summed": (summed, {}),
    "each_row": (each, {}),
    "smoothed": (smoothed, {"bias": True}),
    "bfloat16": (plain, {"dtype": torch.bfloat16}),
    "bfloat16_smoothed": (smoothed, {"dtype": torch.bfloat16}),
    "bfloat16_upcast": (upcast, {"dtype": torch.bfloat16}),
    "bfloat16_shifted_with_bias": (shifted, {"dtype": torch.bfloat16, "bias": True}),
}
"""Those that give eager's bits in chunks."""


def made(name: str) -> tuple[LanguageModel, tuple[Tensor, Tensor]]:
    loss, options = SPLIT[name]
    torch.manual_seed(0)
    return LanguageModel(loss, **options), batch()


def weighted(model: LanguageModel, **more: Any) -> LanguageModel:
    """With a loss that weights the classes, and with more arguments of it."""
    weight: Any = model.class_weight
    model.loss = lambda logits, target: functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), weight=weight, **more
    )
    return model

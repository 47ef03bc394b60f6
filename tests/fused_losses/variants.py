"""The variants: each a model and a batch, at a size of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fused_losses.by_autograd import (
    ByBackward,
    ByLeaves,
    ByTransform,
    by_checkpoints,
)
from tests.fused_losses.closed_form import FusedLinearCrossEntropy, Options
from tests.fused_losses.models import (
    WIDTH,
    Distilled,
    FusedMiddle,
    Head,
    Loss,
    Scaled,
    SumOfTwo,
    Tied,
)


@dataclass(frozen=True)
class Size:
    """Of a case: rows of the batch, and words of the vocabulary."""

    rows: int
    words: int
    width: int = WIDTH


SMALL = Size(512, 1024)
LARGE = Size(2048, 4096)
"""Where the logits dominate all else: 32 MiB of them, beside 1 MiB."""
WIDE = Size(256, 512, 512)
"""Where the weight of the head and its gradient dominate all else, as in large models."""

Build = Callable[[Size], nn.Module]


@dataclass(frozen=True)
class Variant:
    """One way to write such a loss."""

    build: Build
    ids: bool = False
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    def make(self, size: Size) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """Model and batch, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        target = torch.randint(size.words, (size.rows,), generator=generator)
        target[::7] = torch.where(torch.arange(len(target[::7])) % 2 == 0, 5, target[::7])
        x = torch.randn(size.rows, size.width, generator=generator).to(self.dtype)
        ids = torch.randint(size.words, (size.rows,), generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build(size).to(self.dtype)
        return model, (ids if self.ids else x, target)


def closed(**options: Any) -> Loss:
    """The loss that writes its gradient out."""
    how = Options(**options)
    return lambda x, w, b, t: FusedLinearCrossEntropy.apply(x, w, b, t, how)


def of(function: Any, chunks: int = 8) -> Loss:
    """The loss that another function makes."""
    return lambda x, w, b, t: function(x, w, b, t, chunks)


def head(loss: Loss, kind: Any = Head, **options: Any) -> Build:
    """A model with that loss."""
    return lambda size: kind(loss, size.words, width=size.width, **options)


by_transform, by_leaves = of(ByTransform.apply), of(ByLeaves.apply)

VARIANTS: dict[str, Variant] = {
    **{
        f"{n} chunks, {adds}": Variant(head(closed(chunks=n, adds=adds)))
        for n in (1, 2, 3, 4, 8)
        for adds in ("anew", "+=")
    },
    "add_": Variant(head(closed(adds="add_"))),
    "addmm_": Variant(head(closed(adds="addmm_"))),
    "slices": Variant(head(closed(slices=True))),
    "slices, +=": Variant(head(closed(slices=True, adds="+="))),
    "slices, 3 chunks, +=": Variant(head(closed(slices=True, adds="+=", chunks=3))),
    "views, +=": Variant(head(closed(slices="views", adds="+="))),
    "first term, +=": Variant(head(closed(adds="first"))),
    "mul_ in backward, addmm_": Variant(head(closed(adds="addmm_", scales="mul_"))),
    "mul_ in backward": Variant(head(closed(slices=True, adds="+=", scales="mul_"))),
    "bias": Variant(head(closed(), bias=True)),
    "bias, +=": Variant(head(closed(adds="+=", slices=True), bias=True)),
    "scaled": Variant(head(closed(), Scaled)),
    "scaled, +=": Variant(head(closed(adds="+=", slices=True), Scaled)),
    "sum of two": Variant(head(closed(), SumOfTwo)),
    "sum of two, +=": Variant(head(closed(adds="+=", slices=True), SumOfTwo)),
    "bf16": Variant(head(closed()), dtype=torch.bfloat16),
    "bf16, fp32 sums": Variant(head(closed(adds="+=", wide_sum=True)), dtype=torch.bfloat16),
    "bf16, fp32 sums anew": Variant(head(closed(wide_sum=True)), dtype=torch.bfloat16),
    "frozen head": Variant(head(closed(slices=True), frozen="head")),
    "frozen trunk": Variant(head(closed(adds="+="), frozen="trunk")),
    "tied": Variant(head(closed(), Tied), ids=True),
    "tied, +=": Variant(head(closed(adds="+=", slices=True), Tied), ids=True),
    "label smoothing": Variant(head(closed(label_smoothing=0.1))),
    "ignore_index": Variant(head(closed(ignore_index=5))),
    "reduction none": Variant(head(closed(reduction="none"))),
    "reduction sum": Variant(head(closed(reduction="sum"))),
    "z_loss": Variant(head(closed(z_loss=1e-3))),
    "func.grad_and_value": Variant(head(by_transform)),
    "func.grad_and_value, bias": Variant(head(by_transform, bias=True)),
    "autograd.grad": Variant(head(by_leaves)),
    "autograd.grad, bias": Variant(head(by_leaves, bias=True)),
    "autograd.grad, tied": Variant(head(by_leaves, Tied), ids=True),
    "backward()": Variant(head(of(ByBackward.apply))),
    "checkpoint": Variant(head(of(by_checkpoints))),
    "checkpoint, bias": Variant(head(of(by_checkpoints), bias=True)),
    "distilled": Variant(head(closed(), Distilled)),
    "distilled, +=": Variant(head(closed(adds="+=", slices=True), Distilled)),
    "distilled, autograd.grad": Variant(head(by_leaves, Distilled)),
    "fused mlp": Variant(lambda size: FusedMiddle(size.words, size.width)),
    "autocast": Variant(head(closed()), autocast=True),
    "autocast, func": Variant(head(by_transform), autocast=True),
    "autocast, autograd.grad": Variant(head(by_leaves), autocast=True),
    "autocast, checkpoint": Variant(head(of(by_checkpoints)), autocast=True),
}

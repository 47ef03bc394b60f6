"""The compared models, by suite: small ones for two cores, published sizes for a GPU.

The models for a CPU keep the kinds of ops and their proportions. They are narrow enough that a
step takes a fraction of a second. Transformers and the LSTM are less deep as well: Inductor takes
half a minute for eight layers, and compiles each model more than ten times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.comparison.modules import LSTM, Classifier, DiffusionUNet, ViT
from benchmarks.networks.modules import (
    Attention,
    Block,
    Experts,
    LanguageModel,
    Residual,
    normed_conv,
)
from examples import gpt, llama

CLASSES = 1000


@dataclass(frozen=True)
class Trainee:
    """A model that returns its loss, one batch, and its blocks.

    ``chain`` is the path of a list of blocks that take one value and give the next, if the
    model is one.
    """

    model: nn.Module
    args: tuple[Tensor, ...]
    blocks: tuple[str, ...]
    chain: str | None


def _chain(model: nn.Module, args: tuple[Tensor, ...]) -> Trainee:
    count = len(list(model.get_submodule("blocks").children()))
    return Trainee(model, args, tuple(f"blocks.{i}" for i in range(count)), "blocks")


def _tokens(vocab: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(vocab, (batch, seq + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def gpt2(batch: int, *, layers: int, width: int, heads: int, seq: int, vocab: int) -> Trainee:
    """GPT-2: learned positions, dropout 0.1, tied embedding."""
    sizes = gpt.Sizes(layers, width, heads, seq, batch, vocab, 0.1)
    return _chain(gpt.GPT(sizes), _tokens(vocab, batch, seq))


class LlamaLoss(llama.Llama):
    """A Llama that returns its loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Loss of the next tokens."""
        return functional.cross_entropy(super().forward(ids).flatten(0, 1), targets.flatten())


def llama_like(
    batch: int, *, layers: int, width: int, heads: int, kv_heads: int, hidden: int,
    seq: int, vocab: int,
) -> Trainee:  # fmt: skip
    """RoPE, RMSNorm, SwiGLU and grouped queries; no dropout."""
    sizes = llama.Sizes(layers, width, heads, kv_heads, hidden, seq, batch, vocab)
    return _chain(LlamaLoss(sizes), _tokens(vocab, batch, seq))


def vit(batch: int, *, layers: int, width: int, heads: int, image: int) -> Trainee:
    """A ViT with patches of 16 and dropout 0.1."""
    args = torch.randn(batch, 3, image, image), torch.randint(CLASSES, (batch,))
    return _chain(ViT(layers, width, heads, image), args)


def resnet(batch: int, *, counts: tuple[int, ...], image: int) -> Trainee:
    """A ResNet of bottlenecks, channels-last."""
    stem = nn.Sequential(*normed_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    blocks: list[nn.Module] = []
    before = 64
    for level, count in enumerate(counts):
        for i in range(count):
            stride = 2 if level and not i else 1
            blocks.append(Residual(before, 64 << level, stride, bottleneck=True))
            before = 256 << level
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))
    model = Classifier(stem, blocks, head).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, image, image).contiguous(memory_format=torch.channels_last)
    return _chain(model, (images, torch.randint(CLASSES, (batch,))))


def unet(batch: int, *, width: int, levels: int, image: int) -> Trainee:
    """A diffusion U-Net: skips, group norm, attention but at the largest images."""
    images = torch.randn(batch, 3, image, image)
    args = images, torch.rand(batch) * 1000, torch.randn_like(images)
    model = DiffusionUNet(width, levels)
    lists = {"blocks": model.blocks, "up": model.up}
    paths = [f"{name}.{i}" for name, parts in lists.items() for i in range(len(parts))]
    return Trainee(model, args, (*paths, "middle"), None)


def moe(batch: int, *, layers: int, width: int, heads: int, seq: int, vocab: int) -> Trainee:
    """A transformer of eight experts a layer, two chosen; all are computed, as one static graph."""
    blocks = [
        Block(width, Attention(width, heads, seq, fused=True), Experts(width))
        for _ in range(layers)
    ]
    return _chain(LanguageModel(vocab, seq, width, blocks), _tokens(vocab, batch, seq))


def lstm(batch: int, *, width: int, steps: int, stretch: int) -> Trainee:
    """An LSTM unrolled over its steps; a block is a stretch of steps."""
    args = torch.randn(batch, steps, width), torch.randint(CLASSES, (batch,))
    return _chain(LSTM(width, steps, stretch), args)


@dataclass(frozen=True)
class Entry:
    """A model of a suite: what builds it for a batch, and the batch that is measured."""

    build: Callable[[int], Trainee]
    batch: int

    def make(self, batch: int | None = None) -> Trainee:
        """The model with random weights and one batch, the same at each call."""
        torch.manual_seed(0)
        return self.build(batch or self.batch)


SMOKE = {
    "gpt2-tiny": Entry(partial(gpt2, layers=1, width=32, heads=2, seq=32, vocab=64), 4),
}
CPU = {
    "gpt2-small": Entry(partial(gpt2, layers=8, width=192, heads=3, seq=128, vocab=2048), 4),
    "llama": Entry(
        partial(
            llama_like, layers=6, width=256, heads=4, kv_heads=2, hidden=688, seq=128, vocab=2048
        ),
        4,
    ),
    "vit-b": Entry(partial(vit, layers=8, width=192, heads=3, image=112), 8),
    "resnet-50": Entry(partial(resnet, counts=(3, 4, 6, 3), image=64), 12),
    "unet": Entry(partial(unet, width=32, levels=2, image=32), 6),
    "moe": Entry(partial(moe, layers=4, width=128, heads=4, seq=128, vocab=2048), 4),
    "lstm": Entry(partial(lstm, width=256, steps=24, stretch=4), 128),
}
GPU = {
    "gpt2-small": Entry(partial(gpt2, layers=12, width=768, heads=12, seq=1024, vocab=50257), 8),
    "gpt2-medium": Entry(partial(gpt2, layers=24, width=1024, heads=16, seq=1024, vocab=50257), 8),
    "llama-1b": Entry(
        partial(
            llama_like, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, seq=2048,
            vocab=128256,
        ),
        4,
    ),
    "vit-b": Entry(partial(vit, layers=12, width=768, heads=12, image=224), 64),
    "vit-l": Entry(partial(vit, layers=24, width=1024, heads=16, image=224), 32),
    "resnet-50": Entry(partial(resnet, counts=(3, 4, 6, 3), image=224), 64),
    "resnet-152": Entry(partial(resnet, counts=(3, 8, 36, 3), image=224), 32),
    "unet": Entry(partial(unet, width=128, levels=4, image=64), 16),
    "moe": Entry(partial(moe, layers=8, width=512, heads=8, seq=512, vocab=8192), 8),
    "lstm": Entry(partial(lstm, width=1024, steps=64, stretch=8), 256),
}  # fmt: skip
SUITES = {"smoke": SMOKE, "cpu": CPU, "gpu": GPU}

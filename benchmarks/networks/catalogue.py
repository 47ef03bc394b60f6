"""The networks that the benchmarks capture, with one batch each.

Each function returns the arguments of `remat.graph_capture.trace`. Only shapes are used, so
parameters have storage that nobody writes to, and large models cost no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.networks.modules import (
    Attention,
    Block,
    Experts,
    LanguageModel,
    Perceptron,
    Residual,
    UnrolledLSTM,
    normed_conv,
)
from examples.unet import UNet

CLASSES = 1000


def _unwritten(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with parameters that have storage and no contents."""
    with torch.device("meta"):
        model = build()
    return model.to_empty(device="cpu")


def _language(
    blocks: Callable[[], list[Block]], width: int, *, seq: int, batch: int, vocab: int
) -> dict[str, Any]:
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    model = _unwritten(lambda: LanguageModel(vocab, seq, width, blocks()))
    return {"model": model, "args": (tokens, tokens.clone())}


def gpt(
    layers: int, width: int, *, seq: int = 512, batch: int = 8, fused: bool = False,
    head_width: int = 64, vocab: int = 8192,
) -> dict[str, Any]:  # fmt: skip
    """A decoder-only transformer with norms before its parts; no dropout."""

    def blocks() -> list[Block]:
        heads = max(1, width // head_width)
        return [
            Block(width, Attention(width, heads, seq, fused=fused), Perceptron(width))
            for _ in range(layers)
        ]

    return _language(blocks, width, seq=seq, batch=batch, vocab=vocab)


def moe(layers: int = 6, width: int = 512, *, seq: int = 512, batch: int = 4) -> dict[str, Any]:
    """A transformer whose perceptrons are mixtures of eight experts."""

    def blocks() -> list[Block]:
        attention = (Attention(width, width // 64, seq, fused=True) for _ in range(layers))
        return [Block(width, part, Experts(width)) for part in attention]

    return _language(blocks, width, seq=seq, batch=batch, vocab=8192)


def resnet(
    counts: tuple[int, ...], *, bottleneck: bool, batch: int = 32, image: int = 224
) -> dict[str, Any]:
    """A ResNet with the stem and the widths for ImageNet; `counts` are blocks a stage."""

    def build() -> nn.Module:
        parts = [*normed_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        before = 64
        for level, count in enumerate(counts):
            inner = 64 << level
            for i in range(count):
                stride = 2 if level and not i else 1
                parts.append(Residual(before, inner, stride, bottleneck=bottleneck))
                before = 4 * inner if bottleneck else inner
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(*parts, pool, nn.Flatten(), nn.Linear(before, CLASSES))

    return _classified(build, torch.zeros(batch, 3, image, image), (batch,))


def unet(width: int = 32, levels: int = 4, *, batch: int = 4, image: int = 256) -> dict[str, Any]:
    """A U-Net for segmentation."""
    images = torch.zeros(batch, 3, image, image)
    return _classified(lambda: UNet(width, levels), images, (batch, image, image))


def lstm(steps: int = 32, width: int = 512, *, batch: int = 128) -> dict[str, Any]:
    """An LSTM, unrolled over its steps."""
    x = torch.zeros(batch, steps, width)
    return _classified(lambda: UnrolledLSTM(width, CLASSES), x, (batch,))


def _classified(
    build: Callable[[], nn.Module], x: Tensor, shape: tuple[int, ...]
) -> dict[str, Any]:
    target = torch.zeros(shape, dtype=torch.long)
    loss = functional.cross_entropy
    return {"model": _unwritten(build), "args": (x,), "loss_fn": loss, "target": target}


NETWORKS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt12": lambda: gpt(12, 768),
    "gpt48": lambda: gpt(48, 512),
    "gpt105": lambda: gpt(105, 256),
    "gpt_long": lambda: gpt(6, 512, seq=8192, batch=1, fused=True),
    "resnet18": lambda: resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: resnet((3, 4, 6, 3), bottleneck=True),
    "unet": unet,
    "moe": moe,
    "lstm": lstm,
}

"""A U-Net for segmentation, in the form that `remat run examples/unet.py:factory` takes.

Its long skips hold the largest activations from the first op of the step to the last,
which is what plans made for chains cannot see. UNET_WIDTH, UNET_BATCH and UNET_IMAGE
change the sizes.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LEVELS = 4
CLASSES = 4


def double_conv(before: int, after: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Levels down, a bottom, levels up, with a skip across each level."""

    def __init__(self, width: int, levels: int = LEVELS) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        pairs = list(itertools.pairwise(widths))
        self.stem = double_conv(3, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(double_conv(above, below) for above, below in pairs)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in reversed(pairs)
        )
        self.up = nn.ModuleList(double_conv(2 * above, above) for above, _ in reversed(pairs))
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes, h, w] of ``images``, [batch, 3, h, w]."""
        x = self.stem(images)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([skips.pop(), widen(x)], dim=1))
        return self.head(x)


def factory(batch: int | None = None) -> dict[str, Any]:
    """The model, a random batch, and its loss; the caller's RNG is left as it was."""
    width = int(os.environ.get("UNET_WIDTH") or 16)
    batch = batch or int(os.environ.get("UNET_BATCH") or 8)
    size = int(os.environ.get("UNET_IMAGE") or 128)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UNet(width)
        images = torch.randn(batch, 3, size, size)
        labels = torch.randint(CLASSES, (batch, size, size))
    return {
        "model": model,
        "args": (images,),
        "loss_fn": functional.cross_entropy,
        "target": labels,
    }

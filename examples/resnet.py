"""ResNet-18 with the CIFAR stem, in the form that `remat run examples/resnet.py:factory` takes.

The stem is a 3x3 convolution without pooling, on images of 32 x 32: with the ImageNet
stem, the backward of its 112 x 112 batch norm alone takes more than a third of the peak.
The width is half the usual one, so that activations and not parameters hold the memory at
a batch that two cores step in a second. RESNET_WIDTH and RESNET_BATCH change both.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
IMAGE = 32


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to their input."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, before, h, w], to [batch, after, h / stride, w / stride]."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet18(nn.Module):
    """Four stages of two blocks; each stage after the first halves the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(before, after, stride), BasicBlock(after, after, 1))
                for before, after, stride in zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
            )
        )
        self.head = nn.Linear(8 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of ``images``, [batch, 3, 32, 32]."""
        features = self.stages(self.stem(images))
        return self.head(features.mean(dim=(2, 3)))


def factory(batch: int | None = None) -> dict[str, Any]:
    """The model, a random batch, and its loss; the caller's RNG is left as it was."""
    width = int(os.environ.get("RESNET_WIDTH") or 32)
    batch = batch or int(os.environ.get("RESNET_BATCH") or 128)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet18(width)
        images = torch.randn(batch, 3, IMAGE, IMAGE)
        labels = torch.randint(CLASSES, (batch,))
    return {
        "model": model,
        "args": (images,),
        "loss_fn": functional.cross_entropy,
        "target": labels,
    }

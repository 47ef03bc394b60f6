"""The models of published tables, in their sizes; weights have shapes and no contents.

Each function returns the arguments of `remat.capture`. The convolutional ones are those of DTR's
prototype (https://github.com/uwsampl/dtr-prototype, `dtr_eval/shared/torch_models`) and VGG-19 as
Checkmate took it from Keras; Qwen3 14B has the sizes of torchtitan's table of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.networks.modules import normed_conv
from examples import llama
from examples.unet import double_conv

VGG_19 = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
"""Convolutions and channels of each stage."""
QWEN3_14B = {
    "layers": 40, "width": 5120, "heads": 40, "kv_heads": 8, "hidden": 17408, "vocab": 151936,
}  # fmt: skip


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _images(build: Callable[[], nn.Module], batch: int, image: int) -> dict[str, Any]:
    x = torch.zeros(batch, 3, image, image)
    target = torch.zeros(batch, dtype=torch.long)
    loss = functional.cross_entropy
    return {"model": _on_meta(build), "args": (x,), "loss_fn": loss, "target": target}


class CifarBlock(nn.Module):
    """Two 3x3 convolutions; where the shape changes, the shortcut is a slice with zeros added."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride, self.added = stride, after - before
        first = [*normed_conv(before, after, 3, stride), nn.ReLU()]
        self.body = nn.Sequential(*first, *normed_conv(after, after, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Add the body's result to the shortcut's."""
        shortcut = x
        if self.added:
            half = self.added // 2
            shortcut = functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half)
            )
        return functional.relu(self.body(x) + shortcut)


def cifar_resnet(batch: int, depth: int = 32) -> dict[str, Any]:
    """A ResNet for images of 32 x 32 with ``depth`` layers (He et al. 2015, section 4.2)."""

    def build() -> nn.Module:
        parts: list[nn.Module] = [*normed_conv(3, 16, 3), nn.ReLU()]
        before = 16
        for level in range(3):
            for i in range((depth - 2) // 6):
                parts.append(CifarBlock(before, 16 << level, 2 if level and not i else 1))
                before = 16 << level
        return nn.Sequential(*parts, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10))

    return _images(build, batch, 32)


def _normed_first(before: int, after: int, kernel: int) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(before), nn.ReLU(), conv]


class DenseLayer(nn.Module):
    """A bottleneck whose result is put beside its input."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        squeeze = _normed_first(before, 4 * growth, 1)
        self.body = nn.Sequential(*squeeze, *_normed_first(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, c, h, w] to [batch, c + growth, h, w]."""
        return torch.cat((x, self.body(x)), 1)


def densenet(batch: int, depth: int = 100, growth: int = 12) -> dict[str, Any]:
    """DenseNet-BC for images of 32 x 32, halved between its three dense blocks."""

    def build() -> nn.Module:
        channels = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for level in range(3):
            for _ in range((depth - 4) // 6):
                parts.append(DenseLayer(channels, growth))
                channels += growth
            if level < 2:
                parts += [*_normed_first(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
        last = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten()]
        return nn.Sequential(*parts, *last, nn.Linear(channels, 10))

    return _images(build, batch, 32)


def _narrowing(before: int, after: int) -> nn.Sequential:
    """Two convolutions that halve the channels and then reach `after`."""
    first = [*normed_conv(before, before // 2, 3), nn.ReLU(inplace=True)]
    return nn.Sequential(*first, *normed_conv(before // 2, after, 3), nn.ReLU(inplace=True))


class BilinearUNet(nn.Module):
    """A U-Net of four levels from 64 channels on, whose way up interpolates.

    As in https://github.com/milesial/Pytorch-UNet. With 70 MB of parameters in DTR's data, it is
    the version that halves the channels first on the way up.
    """

    def __init__(self) -> None:
        super().__init__()
        down = [(64, 128), (128, 256), (256, 512), (512, 512)]
        up = [(1024, 256), (512, 128), (256, 64), (128, 64)]
        self.stem, self.head = double_conv(3, 64), nn.Conv2d(64, 1, 1)
        self.down = nn.ModuleList(double_conv(*pair) for pair in down)
        self.up = nn.ModuleList(_narrowing(*pair) for pair in up)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 1, h, w] of ``images``, [batch, 3, h, w]."""
        levels = [self.stem(images)]
        for down in self.down:
            levels.append(down(functional.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up in self.up:
            size = levels[-1].shape[-2:]
            wide = functional.interpolate(x, size=size, mode="bilinear", align_corners=True)
            x = up(torch.cat((levels.pop(), wide), 1))
        return self.head(x)


def bilinear_unet(batch: int, image: int = 512) -> dict[str, Any]:
    """That U-Net and a mask to learn."""
    x = torch.zeros(batch, 3, image, image)
    loss = functional.binary_cross_entropy_with_logits
    target = torch.zeros(batch, 1, image, image)
    return {"model": _on_meta(BilinearUNet), "args": (x,), "loss_fn": loss, "target": target}


def vgg_19(batch: int, image: int = 224) -> dict[str, Any]:
    """VGG-19 without dropout, as Keras has it."""

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        before = 3
        for convs, channels in VGG_19:
            for _ in range(convs):
                parts += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
                before = channels
            parts.append(nn.MaxPool2d(2))
        wide = [nn.Linear(512 * (image // 32) ** 2, 4096), nn.ReLU(inplace=True)]
        last = [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000)]
        return nn.Sequential(*parts, nn.Flatten(), *wide, *last)

    return _images(build, batch, image)


class NormedAttention(llama.Attention):
    """Grouped queries; each head's query and key are normed before they are rotated."""

    def __init__(self, sizes: llama.Sizes) -> None:
        super().__init__(sizes)
        self.norm_q = nn.RMSNorm(self.features, eps=1e-6)
        self.norm_k = nn.RMSNorm(self.features, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x``, [batch, seq, width]."""
        batch, seq, _ = x.shape
        parts = (layer(x).view(batch, seq, -1, self.features) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = self.rotary(self.norm_q(q)), self.rotary(self.norm_k(k))
        k, v = (part.repeat_interleave(self.group, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


def qwen3(batch: int, seq: int, **sizes: int) -> dict[str, Any]:
    """Qwen3 in bfloat16; 14B where no sizes are given."""
    made = llama.Sizes(**(sizes or QWEN3_14B), seq=seq, batch=batch)

    def build() -> nn.Module:
        model = llama.Llama(made)
        for block in model.blocks:
            block.attn = NormedAttention(made)
        return model.to(torch.bfloat16)

    ids = torch.zeros(batch, seq, dtype=torch.long)
    loss = llama.next_token_loss
    return {"model": _on_meta(build), "args": (ids,), "loss_fn": loss, "target": ids}

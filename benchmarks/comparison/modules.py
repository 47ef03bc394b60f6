"""Modules of the compared models that no other benchmark needs; each model returns its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class ViT(nn.Module):
    """A vision transformer from torch's own encoder layers; class token, learned positions."""

    def __init__(
        self, layers: int, width: int, heads: int, image: int, *, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (image // 16) ** 2, width))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Loss of ``images``, [batch, 3, h, w], for ``labels``, [batch]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.dropout(x + self.position)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x[:, 0])), labels)


class Classifier(nn.Module):
    """A stem, blocks one after another, a head, and the loss of its logits."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch for ``labels``, [batch]."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), labels)


class Residual(nn.Module):
    """Two convolutions, each after group norm and SiLU, that the time step shifts."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.conv_in = nn.Conv2d(before, after, 3, padding=1)
        self.conv_out = nn.Conv2d(after, after, 3, padding=1)
        self.shift = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map ``x``, [batch, before, h, w], at ``time``, [batch, features]."""
        y = self.conv_in(functional.silu(self.norm_in(x)))
        y = y + self.shift(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_out(functional.silu(self.norm_out(y)))


class ImageAttention(nn.Module):
    """Self-attention of all positions of an image, added to it."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, width, h, w], to the same shape."""
        batch, width, high, wide = x.shape
        parts = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, width // self.heads, -1)
        q, k, v = parts.transpose(3, 4).unbind(1)
        y = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(batch, width, high, wide))


class Level(nn.Module):
    """A residual block, and attention where the images are small."""

    def __init__(self, before: int, after: int, time: int, *, attends: bool) -> None:
        super().__init__()
        self.residual = Residual(before, after, time)
        self.attention = ImageAttention(after) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map ``x`` at ``time``."""
        return self.attention(self.residual(x, time))


class DiffusionUNet(nn.Module):
    """Predicts the noise in an image at a time step; two blocks a level, skips across."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths, time = [width << level for level in range(levels)], 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList()
        before, skipped = width, [width]
        for level, after in enumerate(widths):
            for _ in range(2):
                self.blocks.append(Level(before, after, time, attends=level > 0))
                before = after
                skipped.append(after)
        self.middle = Level(before, before, time, attends=True)
        self.up = nn.ModuleList()
        for level, after in reversed(list(enumerate(widths))):
            for _ in range(2):
                self.up.append(Level(before + skipped.pop(), after, time, attends=level > 0))
                before = after
        self.norm, self.head = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        """Mean squared error of the noise found in ``images``, [batch, 3, h, w]."""
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=images.device) * (-math.log(1e4) / half))
        angles = steps[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.stem(images), list[Tensor]()
        for i, block in enumerate(self.blocks):
            if i and i % 2 == 0:
                x = functional.avg_pool2d(x, 2)
            x = block(x, time)
            skips.append(x)
        x = self.middle(x, time)
        for i, block in enumerate(self.up):
            if i and i % 2 == 0:
                x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return functional.mse_loss(self.head(functional.silu(self.norm(x))), noise)


class Cell(nn.Module):
    """One step of an LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden state and cell, [batch, width]."""
        gates = self.of_input(x) + self.of_state(hidden)
        enter, forget, new, leave = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * cell.tanh(), cell


State = tuple[Tensor, Tensor, Tensor]


class Steps(nn.Module):
    """A stretch of an LSTM's steps; all stretches share one cell."""

    def __init__(self, cell: Cell, first: int, last: int) -> None:
        super().__init__()
        self.cell, self.first, self.last = cell, first, last

    def forward(self, state: State) -> State:
        """From the sequence, [batch, steps, width], hidden state and cell before to those after."""
        x, hidden, cell = state
        for i in range(self.first, self.last):
            hidden, cell = self.cell(x[:, i], hidden, cell)
        return x, hidden, cell


class LSTM(nn.Module):
    """An LSTM, unrolled over its steps in stretches; the last state is classified."""

    def __init__(self, width: int, steps: int, stretch: int, classes: int = 1000) -> None:
        super().__init__()
        self.width, cell = width, Cell(width)
        self.blocks = nn.ModuleList(
            Steps(cell, first, first + stretch) for first in range(0, steps, stretch)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Loss of ``x``, [batch, steps, width], for ``labels``, [batch]."""
        zero = x.new_zeros(len(x), self.width)
        state = (x, zero, zero)
        for block in self.blocks:
            state = block(state)
        return functional.cross_entropy(self.head(state[1]), labels)

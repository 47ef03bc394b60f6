"""The modules of the benchmark's networks, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention; `fused` computes it by one op, else scores are formed."""

    def __init__(self, width: int, heads: int, seq: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        if not fused:
            self.register_buffer("mask", torch.zeros(seq, seq, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x``, [batch, seq, width]."""
        batch, seq, width = x.shape
        shape = (batch, seq, self.heads, width // self.heads)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
            y = scores.masked_fill(self.mask, float("-inf")).softmax(dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Perceptron(nn.Sequential):
    """Two linear layers with GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Experts(nn.Module):
    """A mixture of experts as one static graph: all are computed, the best `chosen` count."""

    def __init__(self, width: int, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Perceptron(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Sum of the experts' results, weighted by the gate, of ``x``, [batch, seq, width]."""
        gates = self.gate(x).softmax(dim=-1)
        best, index = gates.topk(self.chosen, dim=-1)
        weights = torch.zeros_like(gates).scatter(-1, index, best)
        total = torch.zeros_like(x)
        for expert, weight in zip(self.experts, weights.unbind(dim=-1), strict=True):
            total = total + expert(x) * weight.unsqueeze(-1)
        return total


class Block(nn.Module):
    """Attention and a second part, each normed before and added after."""

    def __init__(self, width: int, attention: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.norm_attention, self.norm_second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.second = attention, second

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, [batch, seq, width], to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.second(self.norm_second(x))


class LanguageModel(nn.Module):
    """Embeddings, blocks, and the cross-entropy of the next token."""

    def __init__(self, vocab: int, seq: int, width: int, blocks: list[Block]) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss for ``tokens`` and ``targets``, both [batch, seq]."""
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """A residual block of ResNet: two 3x3 convolutions, or a bottleneck of three."""

    def __init__(self, before: int, inner: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        after = 4 * inner if bottleneck else inner
        if bottleneck:
            parts = [(before, inner, 1, 1), (inner, inner, 3, stride), (inner, after, 1, 1)]
        else:
            parts = [(before, inner, 3, stride), (inner, after, 3, 1)]
        self.body = nn.Sequential()
        for i, (a, b, kernel, step) in enumerate(parts):
            self.body.extend(normed_conv(a, b, kernel, step))
            if i < len(parts) - 1:
                self.body.append(nn.ReLU(inplace=True))
        is_same = stride == 1 and before == after
        self.shortcut = nn.Sequential(*([] if is_same else normed_conv(before, after, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        """Add the body's result to the shortcut's."""
        return functional.relu(self.body(x) + self.shortcut(x))


def normed_conv(before: int, after: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size but for its stride, and its batch norm."""
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(after)]


class UnrolledLSTM(nn.Module):
    """One LSTM cell applied step by step; the last state is classified."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.width = width
        self.of_input, self.of_state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes] of ``x``, [batch, steps, width]."""
        hidden = cell = x.new_zeros(x.shape[0], self.width)
        for part in x.unbind(dim=1):
            gates = self.of_input(part) + self.of_state(hidden)
            enter, forget, new, leave = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
        return self.head(hidden)

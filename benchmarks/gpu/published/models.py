"""The models of published training times, as their authors trained them, on ``meta``.

Those of timm need timm, and torchvision, which timm imports.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from examples import gpt, llama
from tests.zoo.case import name_ops_of_torchvision

Batch = tuple[Tensor, ...]
_MINUS_INFINITY = float("-inf")


class _CudaAutocast(TorchFunctionMode):
    """Computes in float32 what autocast computes so on CUDA, and not on a CPU.

    https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
    """

    _NAMES = (
        "layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "pow", "__pow__",
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of the functions that these models call."""
        if getattr(func, "__name__", "") in self._NAMES and torch.is_autocast_enabled("cpu"):
            args = tuple(
                a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
            )
        return func(*args, **(kwargs or {}))


class Step(nn.Module):
    """A model with its loss, computed in the types of CUDA's autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy over the last dimension."""
        with _CudaAutocast():
            logits = self.model(x)
            return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def timm(
    name: str, batch: int, image: int, *, channels_last: bool = True
) -> tuple[nn.Module, Batch]:
    """A model of timm, whose attention was not fused when its times were published."""
    name_ops_of_torchvision()
    import timm as library
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    with torch.device("meta"):
        model = library.create_model(name).to(memory_format=layout)
    images = torch.zeros(batch, 3, image, image).contiguous(memory_format=layout)
    return Step(model), (images, torch.zeros(batch, dtype=torch.long))


class _UnfusedAttention(gpt.Attention):
    """Attention of single ops, as nanoGPT had it before PyTorch 2."""

    def __init__(self, sizes: gpt.Sizes) -> None:
        super().__init__(sizes)
        self.register_buffer("mask", torch.ones(1, 1, sizes.seq, sizes.seq).tril())
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x``, [batch, seq, width]."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.mask[:, :, :seq, :seq] == 0, _MINUS_INFINITY)
        y = functional.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class _UnfusedGelu(nn.Module):
    """GELU of single ops, as nanoGPT had it at first."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` to the same shape."""
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class _Logits(nn.Module):
    """GPT-2 without its loss, whose logits `Step` takes."""

    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map ids, [batch, seq], to logits, [batch, seq, vocab]."""
        model = self.model
        x = model.dropout(model.token(x) + model.position.weight[: x.shape[1]])
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x))


def gpt2(
    batch: int, seq: int, *, vocab: int = 50257, dropout: float = 0.0, fused: bool = False,
    gelu: str = "tanh",
) -> tuple[nn.Module, Batch]:  # fmt: skip
    """GPT-2 of 124 million parameters."""
    sizes = gpt.Sizes(12, 768, 12, seq, batch, vocab, dropout)
    with torch.device("meta"):
        model = gpt.GPT(sizes)
        for block in model.blocks:
            if not fused:
                block.attn = _UnfusedAttention(sizes)
            block.mlp[1] = _UnfusedGelu() if gelu == "unfused" else nn.GELU(gelu)
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return Step(_Logits(model)), (tokens, tokens.clone())


class _Float32Logits(nn.Module):
    """A language model in bfloat16, the loss of which is computed in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map ids to logits."""
        return self.model(x).float()


def llama3(batch: int, seq: int, **sizes: int) -> tuple[nn.Module, Batch]:
    """Llama 3 8B, or of other sizes, with parameters in bfloat16, as FSDP gathers them."""
    with torch.device("meta"):
        model = llama.Llama(llama.Sizes(batch=batch, seq=seq, **sizes)).to(torch.bfloat16)
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return Step(_Float32Logits(model)), (ids, ids.clone())


class _MptAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class _MptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(width, bias=False)
        self.attn = _MptAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_attn(x))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class _Mpt(nn.Module):
    """MPT: no biases, norms in bfloat16, fused attention, tied embedding."""

    def __init__(self, layers: int, width: int, heads: int, seq: int, vocab: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(_MptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


def mpt(
    batch: int, seq: int, *, layers: int, width: int, heads: int, vocab: int = 50368
) -> tuple[nn.Module, Batch]:
    """MPT in bfloat16, as FSDP gathers it for llm-foundry."""
    with torch.device("meta"):
        model = _Mpt(layers, width, heads, seq, vocab).to(torch.bfloat16)
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return Step(model), (ids, ids.clone())


BUILDERS: dict[str, Callable[..., tuple[nn.Module, Batch]]] = {
    "timm": timm, "gpt2": gpt2, "llama3": llama3, "mpt": mpt,
}  # fmt: skip


def autocast(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast of the CPU, on which the step is traced; none for an empty name."""
    if not dtype:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, dtype))

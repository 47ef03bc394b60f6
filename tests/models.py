"""Small models that each have one trait a training step can have. No two share a trait.

`MODELS` maps a name to a function that returns ``(model, args, kwargs, loss_fn, target)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any] | None, Any]

WIDTH, BATCH = 64, 128


def mlp(*extra: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), *extra]
    return nn.Sequential(*layers)


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH)


class Scalar(nn.Module):
    """Body, then the mean of the squares as a loss of its own."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.body(*args, **kwargs).square().mean()


def plain() -> Case:
    return Scalar(mlp()), (batch(),), {}, None, None


def logits_without_loss() -> Case:
    return mlp(), (batch(),), {}, None, None


def loss_function_with_target() -> Case:
    target = torch.randint(WIDTH, (BATCH,))
    return mlp(), (batch(),), {}, nn.CrossEntropyLoss(), target


def scalar_in_a_large_storage() -> Case:
    """On a CPU `mse_loss` returns its mean in the storage of all the terms."""
    return mlp(), (batch(),), {}, nn.MSELoss(), batch()


def loss_function_alone() -> Case:
    return mlp(), (batch(),), {}, lambda out: out.square().mean(), None


def dropout() -> Case:
    return Scalar(mlp(nn.Dropout(0.3))), (batch(),), {}, None, None


def dropout_with_a_scale_of_its_own() -> Case:
    """1 / (1 - 0.45) rounds differently in float32 and from double precision."""
    return Scalar(mlp(nn.Dropout(0.45))), (batch(),), {}, None, None


def feature_and_alpha_dropout() -> Case:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout2d(0.4), nn.SELU(), nn.AlphaDropout(0.2), nn.Conv2d(8, 8, 3)
    )
    return Scalar(body), (torch.randn(8, 3, 16, 16),), {}, None, None


def dropout_of_nothing() -> Case:
    return Scalar(mlp(nn.Dropout(0.0))), (batch(),), {}, None, None


def batch_norm_in_place_relu() -> Case:
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    return body, (x,), {}, nn.CrossEntropyLoss(), y


def frozen_batch_norm() -> Case:
    case = batch_norm_in_place_relu()
    for module in case[0].modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return case


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), p

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts, dropout_p=self.p, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def attention() -> Case:
    body = nn.Sequential(*[Attention(0.0) for _ in range(3)])
    return Scalar(body), (torch.randn(4, 32, WIDTH),), {}, None, None


def attention_with_dropout() -> Case:
    body = nn.Sequential(*[Attention(0.2) for _ in range(3)])
    return Scalar(body), (torch.randn(4, 32, WIDTH),), {}, None, None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(100, WIDTH), mlp()
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(self.embed(tokens))), targets)


def tied_weights() -> Case:
    tokens = torch.randint(100, (2, BATCH))
    return Tied(), (tokens[0], tokens[1]), {}, None, None


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, scale: float, mask: Tensor) -> dict[str, Any]:
        y = self.body(x) * scale
        return {"loss": (y * mask).mean(), "nothing": None, "more": (y, [y[:2], x])}


def nested_outputs_and_kwargs() -> Case:
    kwargs = {"scale": 2.0, "mask": torch.ones(BATCH, 1)}
    return Outputs(), (batch(),), kwargs, lambda out: out["loss"], None


def nested_outputs_returned() -> Case:
    kwargs = {"scale": 2.0, "mask": torch.ones(BATCH, 1)}
    return Outputs(), (batch(),), kwargs, None, None


def frozen_parameters() -> Case:
    model = Scalar(mlp())
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    return model, (batch(),), {}, None, None


def input_requires_grad() -> Case:
    return Scalar(mlp()), (batch().requires_grad_(),), {}, None, None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x * 3 * x


class TwoHeads(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = mlp(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.first(hidden), self.second(hidden)


def two_heads() -> Case:
    return TwoHeads(), (batch(),), {}, None, None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.body(x)).mean()


def custom_function() -> Case:
    return Custom(), (batch(),), {}, None, None


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([mlp(nn.Dropout(0.2)) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)  # pyright: ignore
        return x.square().mean()


def user_checkpoint() -> Case:
    return Checkpointed(False), (batch(),), {}, None, None


class InPlaceViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1
        y[:, ::2].mul_(2)
        y.view(-1)[:10].add_(1)
        a, b = y.chunk(2, 1)
        return self.last(torch.cat([b.sigmoid(), a], 1)).square().mean()


def in_place_views() -> Case:
    return InPlaceViews(), (batch(),), {}, None, None


class Counting(nn.Module):
    """Overwrites a buffer that it has read, and that later ops read again."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x * self.scale)
        self.scale.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return (y * self.scale.clone()).square().mean()


def overwritten_buffer() -> Case:
    return Counting(), (batch(),), {}, None, None


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x * 1).square().mean()
        x.add_(1)
        return y


def overwritten_input() -> Case:
    return Overwriting(), (batch(),), {}, None, None


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = mlp(), torch.linspace(0, 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.table + torch.tensor(2.0)).square().mean()


def constant_attribute() -> Case:
    return Constant(), (batch(),), {}, None, None


class Noise(nn.Module):
    """Draws numbers that nothing reads, and numbers that do not come from dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        y = self.body(x + 0.1 * torch.randn_like(x))
        return (y * torch.bernoulli(torch.full_like(y, 0.5))).square().mean()


def noise() -> Case:
    return Noise(), (batch(),), {}, None, None


def group_and_layer_norm() -> Case:
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3),
        nn.LayerNorm([8, 12, 12]), nn.AvgPool2d(2), nn.Upsample(scale_factor=2), nn.Flatten(),
    )  # fmt: skip
    return Scalar(body), (torch.randn(8, 3, 16, 16),), {}, None, None


def transformer_layers() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Scalar(body), (torch.randn(4, 32, WIDTH),), {}, None, None


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(2, BATCH, WIDTH)
        for _ in range(6):
            h, c = self.cell(x, (h, c))
        return h.square().mean()


def lstm_cells() -> Case:
    return Cells(), (batch(),), {}, None, None


def double_precision() -> Case:
    return Scalar(mlp()).double(), (batch().double(),), {}, None, None


def bfloat16() -> Case:
    return Scalar(mlp()).bfloat16(), (batch().bfloat16(),), {}, None, None


class ThreeNames(nn.Module):
    """One weight under three names: the order in which its gradients are added matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(32, WIDTH), nn.Embedding(32, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.second.weight = self.head.weight = self.first.weight

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x = functional.gelu(self.inner(self.first(a)))
        return self.head(functional.gelu(self.inner(x + self.second(b)))).square().mean()


def tied_under_three_names() -> Case:
    ids = torch.randint(32, (BATCH,)), torch.randint(32, (BATCH,))
    return ThreeNames(), ids, {}, None, None


class ChannelsLast(nn.Module):
    """Convolutions between channels-last norms, as in ConvNeXt: gradients in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 96, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(96, 96, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = x + convolution(functional.gelu(norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2))
        return x.square().mean()


def gradients_in_another_layout() -> Case:
    return ChannelsLast(), (torch.randn(4, 3, 16, 16),), {}, None, None


MODELS: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        plain, logits_without_loss, loss_function_with_target, scalar_in_a_large_storage,
        loss_function_alone, dropout,
        dropout_with_a_scale_of_its_own, feature_and_alpha_dropout,
        dropout_of_nothing, batch_norm_in_place_relu, frozen_batch_norm, attention,
        attention_with_dropout, tied_weights, nested_outputs_and_kwargs, nested_outputs_returned,
        frozen_parameters, input_requires_grad, two_heads, custom_function,
        user_checkpoint, in_place_views,
        overwritten_buffer, overwritten_input, constant_attribute, noise, group_and_layer_norm,
        transformer_layers, lstm_cells, double_precision, bfloat16, tied_under_three_names,
        gradients_in_another_layout,
    )
}  # fmt: skip


def make(name: str) -> Case:
    """The case of that name, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()

"""Gradients of a step's results come in any strides, and all bits are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.graph_capture.errors import CaptureError


class Then(nn.Module):
    """A module, and what is done with its result."""

    def __init__(self, first: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.then = first, then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x))


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def linear() -> nn.Module:
    return nn.Linear(12, 12)


def conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3, padding=1)


def words() -> Tensor:
    return torch.randn(4, 6, 12)


def image() -> Tensor:
    return torch.randn(2, 3, 6, 6)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (linear, words),
    "residual": (lambda: Then(linear(), lambda y: y + functional.gelu(y)), words),
    "scale": (lambda: Scaled(12), words),
    "batch norm": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(4)), image),
    "frozen batch norm": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(4).eval()), image),
    "batch norm, then relu": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()), image),
    "instance norm": (lambda: nn.Sequential(conv(), nn.InstanceNorm2d(4, affine=True)), image),
    "group norm": (lambda: nn.Sequential(conv(), nn.GroupNorm(2, 4)), image),
    "group norm of channels last": (
        lambda: nn.Sequential(conv(), nn.GroupNorm(2, 4)).to(memory_format=torch.channels_last),
        lambda: image().to(memory_format=torch.channels_last),
    ),
    "layer norm": (lambda: nn.Sequential(linear(), nn.LayerNorm(12)), words),
    "rms norm": (lambda: nn.Sequential(linear(), nn.RMSNorm(12)), words),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(linear()), words),
    "distances": (lambda: Then(linear(), lambda y: torch.cdist(y, y[:, :3])), words),
    "complex": (
        lambda: Then(linear(), lambda y: torch.view_as_complex(y.unflatten(-1, (6, 2))).abs()),
        words,
    ),
    "rotated": (
        lambda: Then(
            linear(),
            lambda y: torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (6, 2))) * 1j),
        ),
        words,
    ),
    "transposed": (lambda: Then(linear(), lambda y: y.transpose(0, 1) * 2), words),
    "a transposed view": (lambda: Then(linear(), lambda y: y.transpose(0, 1)), words),
    "windows": (lambda: Then(linear(), lambda y: y.view(4, 3, 2, 12).permute(0, 2, 1, 3)), words),
    "pooled": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.AvgPool2d(2)), image),
}

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda out: out.sum(),
    "mean": lambda out: out.mean(),
    "sum over one dimension": lambda out: out.sum(-1).square().sum(),
    "transposed": lambda out: (out.flatten(1).t() * torch.linspace(0, 1, out.shape[0])).sum(),
    "classes second": lambda out: functional.cross_entropy(
        out.transpose(1, -1), out.detach().transpose(1, -1).softmax(1)
    ),
    "every other": lambda out: out[..., ::2].square().sum(),
    "contiguous": lambda out: (out * torch.linspace(0, 1, out.numel()).view(out.shape)).sum(),
}


def gradients(step: nn.Module, model: nn.Module, x: Tensor, loss: Any) -> list[Tensor | None]:
    model.zero_grad()
    x.grad = None
    loss(step(x)).backward()
    return [None if p.grad is None else p.grad.clone() for p in (*model.parameters(), x)]


def planned(model: nn.Module, x: Tensor) -> nn.Module | None:
    """None where the plan is refused, as no trace shows the strides of eager."""
    try:
        return remat.rematerialize(model, (x,), budget="100%", solver="store_all")
    except CaptureError as error:
        if "its strides are" not in str(error):
            raise
        return None


@pytest.mark.parametrize("what", MODELS)
def test_gradients_in_any_strides_give_eagers_bits(what: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[what]
    model, x = make(), batch().requires_grad_()
    fast = planned(model, x)
    if fast is None:
        pytest.skip(f"torch {torch.__version__} traces it in strides that it has not")
    unlike = []
    for name, loss in LOSSES.items():
        expected, found = (gradients(step, model, x, loss) for step in (model, fast))
        pairs = list(zip(expected, found, strict=True))
        if not all(a is b or torch.equal(a, b) for a, b in pairs):  # pyright: ignore[reportArgumentType]
            unlike.append(name)
    assert unlike == []


def test_one_number_for_all_is_not_written_out() -> None:
    """As `sum` sends back one number, so backward reads one."""
    model, x = nn.Sequential(linear(), nn.LayerNorm(12)), words()
    fast = remat.rematerialize(model, (x,), budget="100%", solver="store_all", check=False)
    seen: list[tuple[int, ...]] = []

    class Strides(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.native_layer_norm_backward.default:
                seen.append(args[0].stride())
            return func(*args, **(kwargs or {}))

    loss = fast(x).sum()
    with Strides():
        loss.backward()
    assert seen == [(0, 0, 0)]

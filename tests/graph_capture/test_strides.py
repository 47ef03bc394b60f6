"""Layouts of results: the trace has those of the kernels, or the model is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional

import remat
from remat.graph_capture import capture
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.tracing import fake_tensors
from remat.graph_capture.tracing.fake_tensors import RULES, fake_with_eager_strides
from remat.schedules.plan import Prediction

aten = torch.ops.aten
OPS = {
    "turned": lambda: (
        torch.randn(4, 6, 8).transpose(1, 2),
        torch.randn(4, 5, 8, 6).mT,
        torch.randn(2, 4, 3, 6, 5).mT,
    ),
    "sliced": lambda: (
        torch.randn(4, 8, 6)[:, :, ::2].transpose(0, 2),
        torch.randn(4, 5, 8, 6).permute(0, 2, 1, 3),
        torch.randn(2, 3, 4, 6, 5).transpose(1, 2),
    ),
    "channels last": lambda: (
        torch.randn(4, 8, 6),
        torch.randn(4, 8, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(2, 4, 3, 6, 5).to(memory_format=torch.channels_last_3d),
    ),
}


def calls(x: Tensor, image: Tensor, volume: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each op that has a rule, on tensors of every layout."""
    yield from pad_calls(volume)
    pooled, places = functional.max_pool2d(image, 2, return_indices=True)
    laid_out = pooled.contiguous(memory_format=suggest_memory_format(image))
    yield aten.max_unpool2d.default, (laid_out, places, list(image.shape[2:]))
    for grad in (volume, volume.contiguous()):
        yield from group_norm_calls(grad, volume)
    for given in (x, image):
        channels = given.shape[1]
        zeros, ones = torch.zeros(channels), torch.ones(channels)
        norm = (given, ones, zeros, zeros.clone(), ones.clone())
        yield aten.native_batch_norm.default, (*norm, True, 0.1, 1e-5)
        yield aten._native_batch_norm_legit.default, (*norm, True, 0.1, 1e-5)
        yield aten._native_batch_norm_legit_functional.default, (*norm, True, 0.1, 1e-5)
        yield aten._native_batch_norm_legit.no_stats, (*norm[:3], True, 0.1, 1e-5)
        for grad in (given, given.contiguous()):
            yield (
                aten.native_batch_norm_backward.default,
                (grad, given, ones, zeros, ones, zeros, ones, True, 1e-5, [True] * 3),
            )
            yield aten._log_softmax_backward_data.default, (grad, given, 1, torch.float32)
            for f in (aten.hardswish_backward.default, aten.native_dropout_backward.default):
                more = () if f is aten.hardswish_backward.default else (1.1,)
                second = given if not more else given > 0
                yield f, (grad, second, *more)
                yield f, (given, second.contiguous(), *more)
        width = given.shape[-1]
        weight = torch.ones(width), torch.zeros(width)
        _, mean, rstd = aten.native_layer_norm.default(given, [width], *weight, 1e-5)
        yield (
            aten.native_layer_norm_backward.default,
            (given, given, [width], mean, rstd, *weight, [True] * 3),
        )
        yield from backward_calls(given)
        yield aten.log_sigmoid_forward.default, (given,)
        yield aten.roll.default, (given, [1], [2])
        yield aten.roll.default, (given, [1, 2], [1, 2])
        yield aten.roll.default, (given, [0, 2], [1, 2])
        yield aten.roll.default, (given, [-1], [-1])
        yield aten.roll.default, (given, [3])


def backward_calls(given: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Backwards of losses, activations, pads and a norm, for gradients of either layout."""
    plain = given.contiguous()
    for grad, x in ((given, given), (given, plain), (plain, given)):
        for name, more in (
            ("mse_loss", (0,)), ("smooth_l1_loss", (0, 1.0)), ("huber_loss", (0, 1.0)),
        ):  # fmt: skip
            yield getattr(aten, f"{name}_backward").default, (grad, x, plain, *more)
        share = x.sigmoid()
        yield aten.binary_cross_entropy_backward.default, (grad, share, share, None, 0)
        yield aten.binary_cross_entropy.default, (share, grad.sigmoid(), None, 0)
        shapes = {"softplus": (1.0, 20.0), "hardtanh": (-1.0, 1.0), "hardsigmoid": (), "logit": ()}
        for name, more in shapes.items():
            yield getattr(aten, f"{name}_backward").default, (grad, x, *more)
        yield aten.elu_backward.default, (grad, 1.0, 1.0, 1.0, False, x)
        yield aten.rrelu_with_noise_backward.default, (grad, x, x, 0.1, 0.3, True, False)
        if given.ndim == 4:
            wide = functional.pad(grad, (1, 1, 1, 1))
            for name in ("reflection_pad2d", "replication_pad2d"):
                yield getattr(aten, f"{name}_backward").default, (wide, x, [1, 1, 1, 1])
            yield from group_norm_calls(grad, x)
            yield aten.channel_shuffle.default, (grad, 2 - grad.shape[1] % 2)
    even = next((dim for dim, size in enumerate(given.shape) if size % 2 == 0))
    yield aten.glu_backward.default, (aten.glu.default(given, even), given, even)


def group_norm_calls(grad: Tensor, given: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Forward on the layout that torch makes of any, and backward."""
    sizes = (grad.shape[0], grad.shape[1], grad[0, 0].numel(), 1)
    x = given.contiguous(memory_format=suggest_memory_format(given))
    weight = torch.ones(grad.shape[1])
    for laid_out in (x, torch.randn(grad.shape)):
        forward = (laid_out, weight, weight, *sizes, 1e-5)
        _, mean, rstd = aten.native_group_norm.default(*forward)
        yield aten.native_group_norm.default, forward
        arguments = (grad, laid_out, mean, rstd, weight, *sizes, [True] * 3)
        yield aten.native_group_norm_backward.default, arguments


def pad_calls(volume: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Pads of volumes, and their backwards for gradients of either layout."""
    sizes = [1, 0, 1, 2, 1, 1]
    for name in ("reflection_pad3d", "replication_pad3d"):
        padded = getattr(aten, name).default(volume, sizes)
        yield getattr(aten, name).default, (volume, sizes)
        for grad in (padded, padded.contiguous()):
            yield getattr(aten, f"{name}_backward").default, (grad, volume, sizes)


def strides(found: Any) -> list[tuple[int, ...]]:
    results = found if isinstance(found, tuple) else (found,)
    return [result.stride() for result in results]


@pytest.mark.parametrize("layout", list(OPS))
def test_fake_results_are_laid_out_as_real_ones(layout: str) -> None:
    fake = fake_with_eager_strides()
    seen = set()
    for function, args in calls(*OPS[layout]()):
        real = strides(function(*args))
        with fake:
            shown = [fake.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            assert strides(function(*shown)) == real, function
        seen.add(function)
    assert seen == set(RULES)


class Turned(nn.Module):
    """Batch norm over the channels of sequences, as in a Conformer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.norm(self.inner(x).transpose(1, 2)))
        return self.outer(hidden.transpose(1, 2)).flatten(0, 1).square().mean()


class Pixels(nn.Module):
    """Group norm, then attention's layout of pixels, as in a diffusion U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32)
        self.outer = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.hardswish(self.norm(self.inner(x))).flatten(2).transpose(1, 2)
        loss = functional.mse_loss(self.outer(hidden).transpose(1, 2), torch.ones(()))
        return loss + functional.pad(hidden, (0, 0, 1, 1), mode="reflect").exp().mean()


@pytest.mark.parametrize("kind", ["turned", "pixels"])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_norms_over_turned_channels_train_exactly(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(16, 24, 32)
    if kind == "pixels":
        model, x = Pixels(), torch.randn(4, 3, 10, 10)
    fast = remat.rematerialize(model, (x,), budget="95%")
    assert remat.check(model, fast, (x,)).differences == ()


def test_other_layouts_than_traced_are_refused_with_their_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fake_tensors, "RULES", {})
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    with pytest.raises(CaptureError, match=r"contiguous\(\) .*native_batch_norm.* of module norm"):
        capture(Turned(), (torch.randn(16, 24, 32),))


def norms_of(dtype: torch.dtype, of_weights: torch.dtype) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Calls of norms whose inputs and weights may be of two dtypes."""
    x, weight = torch.randn(4, 6, 5, 5).to(dtype), torch.ones(6, dtype=of_weights)
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    legit = aten._native_batch_norm_legit
    for training in (True, False):
        more = (mean, variance, training, 0.1, 1e-5)
        yield aten._native_batch_norm_legit_functional.default, (x, weight, weight, *more)
        yield aten._native_batch_norm_legit_functional.default, (x, None, None, *more)
    yield legit.no_stats, (x, weight, weight, True, 0.1, 1e-5)
    yield legit.no_stats, (x, None, None, True, 0.1, 1e-5)
    yield aten.native_layer_norm.default, (x.reshape(100, 6), [6], weight, weight, 1e-5)
    yield aten.native_layer_norm.default, (x.reshape(100, 6), [6], None, None, 1e-5)
    yield aten.native_group_norm.default, (x, weight, weight, 4, 6, 25, 2, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_of_norms_have_the_dtype_that_the_kernels_give_them(dtype: torch.dtype) -> None:
    for of_weights in {dtype, torch.float32}:
        for op, args in norms_of(dtype, of_weights):
            fake = fake_with_eager_strides()
            given = [fake.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            with fake:
                found = [one.dtype for one in op(*given)]
            assert found == [one.dtype for one in op(*args)], op


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_the_peak_of_a_norm_under_autocast_is_as_measured(norm: type[nn.Module]) -> None:
    blocks = [nn.Sequential(nn.Linear(64, 64), norm(64), nn.GELU()) for _ in range(8)]
    model, x = nn.Sequential(*blocks, nn.Linear(64, 8)), torch.randn(96, 64)
    with torch.autocast("cpu", torch.bfloat16):
        fast = remat.rematerialize(model, (x,), budget="110%", solver="store_all", check=False)
        found = remat.check(model, fast, (x,), steps=0)
    prediction = fast._remat_prediction
    assert isinstance(prediction, Prediction)
    assert found.plan_peak_bytes == prediction.peak_bytes

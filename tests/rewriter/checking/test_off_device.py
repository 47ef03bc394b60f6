"""Eager's step with what it holds moved off the device: the same bits, in less memory."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.budgets import saved_elsewhere, unmodified
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.errors import NotComparedError
from remat.rewriter.checking.check import Check, check
from remat.rewriter.checking.off_device import OffDeviceMemory
from tests.models import MODELS, make

WIDTH, ROWS = 64, 128


def compared(
    model: nn.Module, other: nn.Module, args: tuple[Any, ...], room: float = math.inf, **more: Any
) -> Check:
    return check(
        model, other, args, steps=0, results_elsewhere=True, saved_elsewhere=room, **more
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(MODELS))
def test_eager_keeps_its_bits_with_what_it_saves_in_files(name: str) -> None:
    model, args, kwargs, loss_fn, target = make(name)
    found = compared(model, model, args, kwargs=kwargs, loss_fn=loss_fn, target=target)
    assert found.equal
    assert found.gradients == found.gradients_total
    assert found.baseline_peak_bytes == 0
    assert math.isnan(found.baseline_step_us)


class Odd(torch.autograd.Function):
    """Saves a tensor twice, a part with other strides, an output, and what is neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.sin()
        ctx.save_for_backward(x, x, x.t()[3:], result, x.cos())
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, again, part, result, cos = ctx.saved_tensors
        assert x.untyped_storage()._cdata == part.untyped_storage()._cdata
        assert part.stride() == (1, WIDTH)
        assert part.storage_offset() == 3
        return gradients[0] * cos + (x - again) * result + part.sum()


def saves_oddly(x: Tensor) -> Tensor:
    return Odd.apply(x.tanh())  # pyright: ignore


def writes_in_place(x: Tensor) -> Tensor:
    parts = (torch.relu_(x * 2) + 1).unsafe_chunk(2, 1)  # each has a version of its own
    both = torch.cat([part.exp_() if i else part.sigmoid_() for i, part in enumerate(parts)], 1)
    return both.clone().mul_(3).sin_()


def reads_parts(x: Tensor) -> Tensor:
    a, b, c = torch.cat([x, x.cos(), x.exp()], 1).split(WIDTH, 1)
    return (a * b).t().contiguous().t() * c[:, :1].expand(-1, WIDTH)


def is_complex(x: Tensor) -> Tensor:
    z = torch.fft.rfft(x.sin())
    return torch.fft.irfft(z * z.conj() * z.abs(), n=WIDTH)


def is_sparse(x: Tensor) -> Tensor:
    weights = torch.eye(ROWS).to_sparse() * 0.5
    return torch.sparse.mm(weights, x.exp()).sin()


def checkpointed(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(lambda z: z.sin().exp(), y.cos(), use_reentrant=False).tanh()

    return checkpoint(inner, x.exp(), use_reentrant=False)


def checkpointed_by_reentry(x: Tensor) -> Tensor:
    return checkpoint(lambda z: z.sin().exp().tanh(), x.exp(), use_reentrant=True)


def hooked(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        y = x.exp().sin()
    with torch.autograd.graph.save_on_cpu():
        return y.cos().tanh()


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.exp().mean()
    return x.detach().sin() * x.sin() * scale


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight(x)).square().mean()


KINDS = [
    saves_oddly, writes_in_place, reads_parts, is_complex, is_sparse, checkpointed,
    checkpointed_by_reentry, hooked, without_gradients,
]  # fmt: skip


@pytest.mark.parametrize("function", KINDS)
def test_whatever_is_saved_comes_back_as_it_was(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Applied(function), torch.randn(ROWS, WIDTH)
    assert compared(model, model, (x,)).equal


class Larger(nn.Module):
    """A little more than a model gives, of the same parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * (1 + 1e-6)


def test_a_difference_is_found_as_ever() -> None:
    model, args, *_ = make("plain")
    other = Larger(model)
    ever, found = check(model, other, args, steps=0), compared(model, other, args)
    assert len(found.differences) == found.gradients_total + 1
    assert min(found.distances) > 0
    assert (found.differences, found.distances) == (ever.differences, ever.distances)


def test_all_that_a_step_changes_is_put_back_from_files() -> None:
    model, args, *_ = make("overwritten_buffer")
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(args), torch.get_rng_state()
    compared(model, model, args)
    assert all(torch.equal(one, before[0][name]) for name, one in model.state_dict().items())
    assert torch.equal(before[1][0], args[0])
    assert torch.equal(before[2], torch.get_rng_state())


class Deep(nn.Module):
    """Layers whose results a list holds until forward has ended, if it is asked to."""

    def __init__(self, holds: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.drop, self.holds = nn.Dropout(0.1), holds

    def forward(self, x: Tensor) -> Tensor:
        held: list[Tensor] = []
        for layer in self.layers:
            x = self.drop(torch.nn.functional.silu(layer(x)))
            if self.holds:
                held.append(x)
        return x.square().mean()


def stepping(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(x)
        loss.backward()
        return loss

    return run


def test_a_moved_step_takes_no_more_than_is_predicted() -> None:
    model, x = Deep(holds=False), torch.randn(512, 256)
    graph = remat.capture(model, (x,))
    predicted = saved_elsewhere(graph)[0] - graph.resident.total_bytes
    run = stepping(model, x)
    moved = OffDeviceMemory("cpu", (*model.parameters(), x)).running(run, math.inf)
    moved()
    gc.collect()
    model.zero_grad()
    measured = measure_peak(moved)
    assert measured <= predicted * 1.02
    assert predicted < 0.6 * (unmodified(graph).peak_bytes - graph.resident.total_bytes)


def test_a_model_that_holds_too_much_itself_is_not_compared() -> None:
    x, room = torch.randn(512, 256), 5 * 512 * 256 * 4
    assert compared(Deep(holds=False), model := Deep(holds=False), (x,), room) is not None
    assert compared(model, model, (x,), room).equal
    holding = Deep(holds=True)
    with pytest.raises(NotComparedError, match="holds more at once than the budget allows"):
        compared(holding, holding, (x,), room)


def test_a_model_that_takes_no_hooks_is_not_compared() -> None:
    def disables(x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("no saved tensor hooks in here"):
            return x.sin()

    model = Applied(disables)
    with pytest.raises(NotComparedError, match="cannot be moved"):
        compared(model, model, (torch.randn(ROWS, WIDTH),))


def test_where_no_file_can_be_made_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_OFFLOAD", "/no/such/folder")
    model, args, *_ = make("plain")
    with pytest.raises(NotComparedError, match="set REMAT_OFFLOAD to a folder that can"):
        compared(model, model, args)


def test_off_a_gpu_copies_are_on_the_host() -> None:
    kept = torch.randn(ROWS, WIDTH).t()
    for where in ("cuda:0", "cpu"):
        read = OffDeviceMemory(where, ()).keep(kept)
        assert torch.equal(read(), kept)
        assert read().data_ptr() != kept.data_ptr()
        assert read().stride() == kept.stride()

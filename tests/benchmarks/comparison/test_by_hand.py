"""What people write by hand trains as eager does, and its peaks are those that it is for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.comparison import methods
from benchmarks.comparison.bench import Bench
from benchmarks.comparison.by_hand import chunked_loss, early_update, host_copies
from benchmarks.comparison.by_hand.updating_bench import UpdatingBench
from benchmarks.comparison.methods import DoesNotApplyError, Variant
from benchmarks.comparison.models import Trainee, gpt2, lstm

BY_HOST: dict[str, Callable[[Trainee], Variant]] = {
    "all": partial(host_copies.save_all, device="cpu"),
    "each block": partial(host_copies.save_blocks, every=1, device="cpu"),
    "every second": partial(host_copies.save_blocks, every=2, device="cpu"),
}


def trainee() -> Trainee:
    torch.manual_seed(0)
    return gpt2(4, layers=2, width=32, heads=2, seq=32, vocab=512)


@cache
def bench() -> Bench:
    return Bench(trainee(), "cpu")


@cache
def eager_peak_bytes() -> int:
    return bench().peaks(methods.eager(bench().trainee))["peak_bytes"]


def are_equal(bench: Bench, variant: Variant) -> bool:
    pairs = zip(bench.gradients(variant), bench.gradients(bench.unmodified()), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", BY_HOST)
def test_copies_to_the_host_keep_bits_and_lower_the_peak(name: str) -> None:
    variant = BY_HOST[name](bench().trainee)
    assert are_equal(bench(), variant)
    assert bench().peaks(variant)["peak_bytes"] < eager_peak_bytes()
    assert "forward" not in vars(bench().trainee.model.get_submodule("blocks.0"))


def test_fewer_blocks_on_the_host_leave_more_on_the_device() -> None:
    peaks = {name: bench().peaks(BY_HOST[name](bench().trainee)) for name in BY_HOST}
    assert peaks["each block"]["peak_bytes"] < peaks["every second"]["peak_bytes"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4), torch.randn(3, 4).T, torch.randn(2, 3, 4, 5)[:, :, ::2],
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 1).expand(3, 4), torch.arange(6).view(2, 3), torch.tensor(2.5),
        torch.randn(0, 3), torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(4) > 0,
    ],
)  # fmt: skip
def test_a_copy_outside_has_the_bits_and_the_strides(tensor: torch.Tensor) -> None:
    copied = host_copies._outside(tensor)
    assert torch.equal(copied, tensor)
    assert copied.stride() == torch.empty_like(tensor, device="meta").stride()


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_a_loss_in_chunks_has_eagers_gradients_within_rounding(chunks: int) -> None:
    variant = chunked_loss.in_chunks(bench().trainee, chunks)
    found, expected = bench().gradients(variant), bench().gradients(bench().unmodified())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert isinstance(bench().trainee.model.head, nn.Linear)
    assert functional.cross_entropy.__module__ == "torch.nn.functional"


def test_a_loss_in_chunks_needs_less_than_eager() -> None:
    variant = chunked_loss.in_chunks(bench().trainee, 4)
    assert bench().peaks(variant)["peak_bytes"] < eager_peak_bytes()


def test_a_loss_of_a_class_has_no_chunks() -> None:
    with pytest.raises(DoesNotApplyError, match="its loss is not over tokens"):
        chunked_loss.in_chunks(lstm(2, width=8, steps=2, stretch=1), 4)


def updated() -> UpdatingBench:
    return UpdatingBench(trainee(), "cpu")


def test_updates_in_hooks_are_those_after_backward() -> None:
    made = updated()
    variant = early_update.in_backward(made.trainee)
    before = [parameter.detach().clone() for parameter in made.parameters]
    assert are_equal(made, variant)
    assert all(float(change.abs().max()) > 0 for change in made.gradients(variant))
    assert all(torch.equal(a, b) for a, b in zip(made.parameters, before, strict=True))


def test_state_of_the_optimizer_counts_and_no_gradient_is_left() -> None:
    made = updated()
    variant, plain = early_update.in_backward(made.trainee), made.unmodified()
    made.step(variant)
    made.step(plain)
    assert all(parameter.grad is None for parameter in made.parameters)
    size_bytes = sum(parameter.nbytes for parameter in made.parameters)
    held = [sum(one.nbytes for one in made.held(each)) for each in (variant, plain)]
    others = sum(one.nbytes for one in Bench.held(made, plain))
    # Two moments of a parameter each, and a count of steps.
    assert held == [others + 2 * size_bytes + 4 * len(made.parameters)] * 2


def test_updates_in_hooks_need_less_where_gradients_are_the_peak() -> None:
    torch.manual_seed(0)
    wide = UpdatingBench(gpt2(1, layers=3, width=128, heads=2, seq=8, vocab=64), "cpu")
    in_hooks, plain = early_update.in_backward(wide.trainee), wide.unmodified()
    for one in (in_hooks, plain):
        wide.step(one)
    assert wide.peaks(in_hooks)["peak_bytes"] < wide.peaks(plain)["peak_bytes"]

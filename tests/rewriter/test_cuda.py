"""Random streams, outcomes that do not repeat, and checks on a CUDA device that only counts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.checks import Batch, advice_of, failures, require_equal
from remat.graph_capture import capture
from remat.graph_capture.devices.cuda import CudaMeter
from remat.graph_capture.errors import RewriteError
from remat.rewriter.checking import check as checking
from remat.rewriter.checking.check import check
from remat.rewriter.checking.comparison import EagerVariation, differing_names
from remat.rewriter.graphs.rng import run_with_rng_state, save_rng_state, set_rng_state
from remat.rewriter.rewriting import rewrite
from remat.solver import make_solver
from tests.fake_cuda import FakeCuda, cuda
from tests.models import make

__all__ = ["cuda"]
ONES = torch.ones(16, dtype=torch.uint8)


def test_a_draw_on_a_device_moves_the_stream_of_that_device_alone(cuda: FakeCuda) -> None:
    before = torch.get_rng_state()
    cuda.stream = ONES.clone()
    saved = save_rng_state("cuda:0")
    set_rng_state(ONES * 2, "cuda:0")

    def draw() -> Tensor:
        drawn_from = cuda.stream.clone()
        cuda.stream += 1
        return drawn_from

    assert torch.equal(run_with_rng_state(saved, "cuda:0", draw), ONES)
    assert torch.equal(cuda.stream, ONES * 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_draw_on_the_cpu_leaves_the_device_alone(cuda: FakeCuda) -> None:
    saved = save_rng_state("cpu")
    first = torch.rand(3)
    assert torch.equal(run_with_rng_state(saved, "cpu", torch.rand, 3), first)
    assert not cuda.stream.any()


def outcome(**changes: Any) -> dict[str, Any]:
    return {"gradient of w": torch.tensor([1.0, 2.0]), "buffer n": torch.tensor(3), **changes}


def against(*runs: dict[str, Any]) -> EagerVariation:
    """Runs of eager, the first of which is expected."""
    variation = EagerVariation(runs[0])
    for run in runs[1:]:
        variation.add(run)
    return variation


def test_what_eager_repeats_must_have_its_bits() -> None:
    other = outcome(**{"gradient of w": torch.tensor([1.0, 2.0 + 1e-6])})
    assert differing_names(against(outcome(), outcome()), outcome()) == ()
    assert differing_names(against(outcome(), outcome()), other) == ("gradient of w",)


def test_what_eager_does_not_repeat_must_be_as_near_as_it_is_to_itself() -> None:
    again = outcome(**{"gradient of w": torch.tensor([1.0, 2.0 + 1e-6])})
    near = outcome(**{"gradient of w": torch.tensor([1.0, 2.0 - 3e-6])})
    far = outcome(**{"gradient of w": torch.tensor([1.0, 2.1])})
    absent = outcome(**{"gradient of w": None})
    broken = outcome(**{"gradient of w": torch.tensor([1.0, float("nan")])})
    variation = against(outcome(), again, outcome())
    assert list(variation.noise) == ["gradient of w"]
    for found in (again, near, outcome()):
        assert differing_names(variation, found) == ()
    for found in (far, absent, broken):
        assert differing_names(variation, found) == ("gradient of w",)
    counted = against(outcome(), outcome(**{"buffer n": torch.tensor(4)}))
    assert differing_names(counted, outcome(**{"buffer n": torch.tensor(5)})) == ("buffer n",)


@pytest.fixture
def checked(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Checks take the model to be on ``cuda:0``."""
    monkeypatch.setattr(checking, "resolved_device", lambda *_: "cuda:0")
    monkeypatch.setattr(CudaMeter, "library_bytes", lambda _: 512)
    return cuda


def planned(name: str = "dropout") -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    model, args, *_ = make(name)
    graph = capture(model, args, device="cpu")
    return model, rewrite(model, make_solver("chen_sqrt").schedule(graph)), args


def test_a_check_counts_what_the_allocator_gives_and_reserves(
    checked: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, module, args = planned()
    checked.device_us = 7000.0
    eager_run = checking.eager_run

    def allocating(*given: Any) -> Any:
        run = eager_run(*given)

        def held() -> Any:
            checked.allocate(6000)
            output = run()
            checked.allocate(-6000)
            return output

        return held

    monkeypatch.setattr(checking, "eager_run", allocating)
    found = check(model, module, args, steps=1)
    assert found.differences == found.unsteady == ()
    assert found.baseline_peak_bytes % 512 == 6000 % 512
    assert found.plan_step_us == pytest.approx(7000.0)
    assert found.baseline_reserved_bytes == found.baseline_peak_bytes


def test_a_stream_of_the_device_that_moves_otherwise_is_found_and_put_back(
    checked: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, module, args = planned()
    forward = type(module).forward

    def drawing(self: Any, *given: Any, **more: Any) -> Any:
        checked.stream = checked.stream + 1
        return forward(self, *given, **more)

    monkeypatch.setattr(type(module), "forward", drawing)
    found = check(model, module, args, steps=1)
    assert found.differences == ("random stream of cuda:0",)
    assert not found.rng_equal
    assert not checked.stream.any()


class Unsteady(nn.Module):
    """Its output moves a little at each call, as sums in no fixed order do.

    What moves it comes through a pipe, where capture does not see it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.end, other = os.pipe()
        os.write(other, bytes([0, 1] * 100))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean() * (1 + 1e-6 * os.read(self.end, 1)[0])


def test_a_check_tells_what_eager_itself_does_not_repeat(checked: FakeCuda) -> None:
    model, args = Unsteady(), (torch.randn(4, 8),)
    graph = capture(model, args, device="cpu")
    module = rewrite(model, make_solver("store_all").schedule(graph))
    found = check(model, module, args, steps=1)
    assert "output" in found.unsteady
    assert found.equal
    assert found.gradients == 0 < found.gradients_total
    (said,) = advice_of(found, 0)
    assert "eager itself does not repeat 3 results" in said
    assert "torch.use_deterministic_algorithms(True)" in said


def found_with(**changes: Any) -> checking.Check:
    figures = {"baseline_peak_bytes": 10_000, "plan_peak_bytes": 10_000}
    equal = dict.fromkeys(("outputs_equal", "gradients_equal", "buffers_equal", "rng_equal"), True)
    times = {"baseline_step_us": 1.0, "plan_step_us": 1.0, "gradients": 1, "gradients_total": 1}
    return checking.Check(**{**equal, **times, **figures, **changes})  # pyright: ignore


@pytest.mark.parametrize(("reserved_bytes", "is_told"), [(11_000, False), (11_001, True)])
def test_reserved_memory_beyond_a_tenth_is_worth_a_word(reserved_bytes: int, is_told: bool) -> None:
    said = advice_of(found_with(plan_reserved_bytes=reserved_bytes), 10_000)
    assert bool(said) == is_told
    assert all("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in line for line in said)


def test_a_budget_is_exceeded_by_what_is_asked_for_not_by_larger_blocks() -> None:
    larger = found_with(plan_rounding_bytes=500)
    assert failures(larger, 9_400) == ["the measured peak, 9.8 KiB, exceeds the budget of 9.2 KiB"]
    assert failures(larger, 9_500) == []
    (said,) = advice_of(larger, 9_500)
    assert "0.5 KiB more than the budget, in blocks" in said
    assert advice_of(larger, 10_000) == ()


@pytest.mark.parametrize(("moves_at", "differences"), [(3, ()), (99, ("output",))])
def test_eager_runs_again_before_a_plan_is_said_to_differ(
    checked: FakeCuda, monkeypatch: pytest.MonkeyPatch, moves_at: int, differences: tuple[str, ...]
) -> None:
    model, module, args = planned("plain")
    eager_run, plan_run, runs = checking.eager_run, checking.plan_run, list[int]()

    def rarely_another(*given: Any) -> Any:
        run = eager_run(*given)

        def again() -> Any:
            runs.append(1)
            return run() * (1 + 1e-6 * (len(runs) == moves_at))

        return again

    def another(*given: Any) -> Any:
        run = plan_run(*given)
        return lambda: run() * (1 + 1e-6)

    monkeypatch.setattr(checking, "plan_run", another)
    monkeypatch.setattr(checking, "eager_run", rarely_another)
    found = check(model, module, args, steps=1)
    assert found.differences == differences
    assert found.unsteady == (() if differences else ("output",))
    of_the_times = 2  # one for the peak, one for the time
    assert len(runs) - of_the_times == (checking.MOST_EAGER if differences else moves_at)


@pytest.mark.parametrize(
    ("beyond_bytes", "budget_bytes", "is_refused"),
    [(999, 10**6, False), (1000, 10**6, True), (2**21 - 1, 10**11, False), (2**21, 10**11, True)],
)
def test_a_peak_beyond_the_budget_by_less_than_an_allocator_takes_is_told_and_no_error(
    monkeypatch: pytest.MonkeyPatch, beyond_bytes: int, budget_bytes: int, is_refused: bool
) -> None:
    found = found_with(plan_peak_bytes=budget_bytes + beyond_bytes)
    monkeypatch.setattr(checking, "check", lambda *args, **options: found)
    batch = Batch((), None, None, None, "none", accumulate=False)
    text = "Give a smaller budget"
    kinds = pytest.raises(RewriteError, match=text), pytest.warns(UserWarning, match=text)
    with kinds[not is_refused]:
        require_equal(nn.Identity(), nn.Identity(), batch, budget_bytes)

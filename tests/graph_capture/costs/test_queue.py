"""Host and device as two clocks, and whole steps on a device that only counts."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from remat.graph_capture import capture, trace
from remat.graph_capture.costs import step_time
from remat.graph_capture.costs.cache import CostCache, OpCost, WholeStepTimes
from remat.graph_capture.costs.queue import in_a_queue, queue_us
from remat.graph_capture.costs.step_time import STEP_NOT_TIMED, StepRounds, calibrated
from remat.graph_capture.devices.cuda import CudaMeter
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from tests.fake_cuda import FakeCuda, as_if_on_cuda, cuda

__all__ = ["as_if_on_cuda", "cuda"]

QUICK, SLOW = OpCost(2.0, queue_us=10.0), OpCost(100.0, queue_us=10.0)


def step() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 17), nn.GELU(), nn.Dropout(0.1), nn.Linear(17, 5))
    return {"model": model, "args": (torch.randn(9, 33),), "loss_fn": torch.sum}


@pytest.mark.parametrize(
    ("ops", "takes_us"),
    [
        ([SLOW] * 4, 10 + 4 * 100),  # the first waits for the host, the others for the device
        ([QUICK] * 4, 4 * 10 + 2),
        ([SLOW, *[QUICK] * 5], 10 + 100 + 5 * 2),  # the host is ahead by 9 ops
        ([*[QUICK] * 5, SLOW], 6 * 10 + 100),
        ([SLOW, *[QUICK] * 20], 21 * 10 + 2),  # the device has caught up
        ([], 0),
    ],
)
def test_a_queue_runs_until_its_last_op_ends(ops: list[OpCost], takes_us: float) -> None:
    assert queue_us(ops) == takes_us


def graph_for_cuda(of_each: list[OpCost]) -> tuple[TrainingGraph, dict[str, OpCost]]:
    graph = replace(trace(**step()).graph, device="cuda:0")
    return graph, dict(zip([op.name for op in graph.ops], cycle(of_each), strict=False))


def forward_us(graph: TrainingGraph) -> list[float]:
    return [op.cost_us for op in graph.ops if op.phase == "forward"]


@pytest.mark.parametrize(("of_each", "takes_us"), [([SLOW], 100.0), ([QUICK], 10.0)])
def test_an_op_costs_what_one_more_run_adds(of_each: list[OpCost], takes_us: float) -> None:
    graph, costs = graph_for_cuda(of_each)
    queued = in_a_queue(graph, costs)
    assert set(forward_us(queued.graph)) == {takes_us}
    assert queued.step.again_us == pytest.approx(queued.step.expected_us)


@pytest.mark.parametrize("of_each", [[SLOW], [QUICK], [SLOW, *[QUICK] * 4], [*[QUICK] * 30, SLOW]])
def test_costs_add_up_to_the_queue_with_and_without_recomputing(of_each: list[OpCost]) -> None:
    graph, costs = graph_for_cuda(of_each)
    queued = in_a_queue(graph, costs)
    found = calibrated(*queued)
    assert found.time_us == pytest.approx(queued.step.step_us)
    assert sum(forward_us(found)) == pytest.approx(queued.step.again_us)
    alone_us = sum(one.alone_us for one in costs.values())
    assert found.time_us <= alone_us + 10


def taking(patch: pytest.MonkeyPatch, step: WholeStepTimes | None) -> None:
    patch.setattr(StepRounds, "whole", lambda *_: step)


@pytest.mark.usefixtures("clocked")
@pytest.mark.parametrize("share", [0.8, 1.5])
def test_costs_add_up_to_the_step_as_timed(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    as_if_on_cuda.device_us = 1e6
    taking(monkeypatch, None)
    by_clocks = capture(**step(), device="cuda")
    forward, ops_us = sum(forward_us(by_clocks)), by_clocks.time_us
    assert "by two clocks, as it was not timed" in by_clocks.notes[-1]
    first_us = next(op.cost_us for op in by_clocks.ops if op.target == TANGENTS)
    assert first_us > 0  # the device waits for the first op to be queued
    taking(monkeypatch, WholeStepTimes(share * ops_us, 0.0, 1.2 * forward, forward))
    graph = capture(**step(), device="cuda")
    assert graph.time_us == pytest.approx(share * ops_us)
    assert sum(forward_us(graph)) == pytest.approx(1.2 * forward)  # as the segments took
    assert f"take {1 / share:.2f} times the step as timed" in graph.notes[-1]


@pytest.mark.usefixtures("clocked")
def test_a_step_is_timed_on_the_device_once_and_kept(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[float] = []

    def noted(meter: CudaMeter, run: Any) -> float:
        run()
        timed.append((4e5, 6e5, 0.0, 0.0, 6e5, 4e5)[len(timed) % 6])  # in turns, in both orders
        return timed[-1]

    monkeypatch.setattr(step_time, "free_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(CudaMeter, "step_us", noted)
    graph = capture(**step(), device="cuda")
    assert graph.time_us == pytest.approx(4e5)
    (found,) = CostCache.of(CudaMeter("cuda:0")).steps.values()
    assert (found.step_us, found.again_us, found.keeping_us) == (4e5, 2e5, 0)
    n_timed = len(timed)
    assert capture(**step(), device="cuda").time_us == graph.time_us
    assert len(timed) == n_timed


@pytest.mark.usefixtures("clocked")
def test_a_step_beyond_the_budget_is_not_run(
    as_if_on_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time, "_runs_of", lambda *_: pytest.fail("ran the step"))
    from remat.graph_capture.costs.op_costs import measure_costs

    graph = measure_costs(trace(**step(), device="cuda"), most_bytes=0)
    assert STEP_NOT_TIMED in graph.notes
    assert "by two clocks" in graph.notes[-1]


def test_the_later_half_of_rounds_counts(cuda: FakeCuda) -> None:
    """The clocks of a cold device sink while it runs."""
    assert CudaMeter("cuda:0").of_rounds([80.0, 90.0, 100.0, 101.0, 99.0, 100.0]) == 100.0

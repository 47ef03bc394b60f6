"""What a step takes beyond its ops: run as a whole, added where every schedule runs it once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import remat
from remat.graph_capture import trace
from remat.graph_capture.costs import op_costs, op_times, step_time
from remat.graph_capture.costs.cache import CostCache, WholeStepTimes
from remat.graph_capture.costs.step_time import costs_of, less_for_kept
from remat.graph_capture.devices.meter import CpuMeter
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from remat.graph_capture.joint.nodes import copy_of
from remat.schedules.simulate import simulate
from tests.models import make

pytestmark = pytest.mark.usefixtures("clocked")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path


def costed(name: str) -> TrainingGraph:
    model, args, *_ = make(name)
    return op_costs.measure_costs(trace(model, args))


def tangents_us(graph: TrainingGraph) -> float:
    return next(op.cost_us for op in graph.ops if op.target == TANGENTS)


def taking(step_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time.StepRounds, "whole", lambda *_: WholeStepTimes(step_us))


def test_what_no_op_accounts_for_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taking(1e6, monkeypatch)
    graph = costed("plain")
    assert graph.time_us == pytest.approx(1e6)
    assert 0 < tangents_us(graph) < 1e6
    least = remat.solve(graph, "min")
    assert least.schedule is not None
    again_us = sum(
        (count - 1) * graph.ops[graph.op_index[name]].cost_us
        for name, count in least.schedule.computations().items()
    )
    found = simulate(graph, least.schedule)
    assert found.time_us == pytest.approx(1e6 + again_us)
    assert found.overhead == pytest.approx(again_us / 1e6)


def test_a_step_quicker_than_its_ops_changes_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    taking(1e-3, monkeypatch)
    assert tangents_us(costed("plain")) == 0


@pytest.mark.parametrize("name", ["plain", "dropout", "batch_norm_in_place_relu", "tied_weights"])
def test_a_step_is_run_on_made_data_and_its_time_kept(name: str, folder: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, args, *_ = make(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    traced = trace(model, args)
    graph = op_costs.measure_costs(traced)
    ((of_graph, step),) = CostCache().steps.items()
    assert of_graph == traced.graph.hash
    assert step.step_us > 0
    # The ops' times are made to add up to the step's, but for the rounding of the sum.
    assert graph.time_us >= step.step_us * (1 - 1e-12)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_step_without_room_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "free_bytes", lambda device: 1024)
    assert tangents_us(costed("plain")) == 0


def test_a_step_that_does_not_run_on_made_data_is_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such data")

    def refusing(module: fx.GraphModule, *edits: Any) -> fx.GraphModule:
        copied = copy_of(module, *edits)
        copied.forward = refuse
        return copied

    monkeypatch.setattr(step_time, "copy_of", refusing)
    with pytest.warns(UserWarning, match=r"as a whole on made data \(no such data\)"):
        assert tangents_us(costed("plain")) == 0


def test_the_room_is_the_peak_that_the_judge_finds() -> None:
    for name in ("plain", "dropout", "batch_norm_in_place_relu"):
        graph = costed(name)
        everything = remat.solve(graph, 1 << 60, "store_all").schedule
        assert everything is not None
        judged = simulate(graph, everything).peak_bytes
        assert step_time.peak_bytes(graph) + graph.resident.total_bytes == judged


class Clock(CpuMeter):
    """Steps take what is told, one after the other."""

    def __init__(self, told_us: list[float]) -> None:
        super().__init__()
        self.told_us = told_us

    def step_us(self, run: Any) -> float:
        run()
        return self.told_us.pop(0)


def test_the_runs_of_a_step_take_turns_in_both_orders() -> None:
    ran: list[int] = []
    runs = [partial(ran.append, number) for number in range(3)]
    rounds = step_time.StepRounds(CpuMeter(), lambda: step_time.WholeRuns(*runs, lambda: 0.0))
    rounds.some()
    share = len(ran)
    rounds.whole(costed("plain"))
    assert len(ran) == 3 * share == 3 * step_time.ROUNDS
    assert ran[:6] == [0, 1, 2, 2, 1, 0]


def test_a_slow_while_of_the_machine_changes_no_time_of_the_step() -> None:
    """Of three shares of one long round each; the second is twice as slow, in the other order."""
    round_us, forward_us = [5e6, 6e6, 1e6], [2e6, 4e6, 2e6]
    told_us = [*round_us, *(2 * each_us for each_us in reversed(round_us)), *round_us]
    graph = costed("plain")
    name = next(op.name for op in graph.ops if op.phase == "forward")
    runs = step_time.WholeRuns(*[lambda: None] * 3, lambda: forward_us.pop(0), again=(name,))
    found = step_time.StepRounds(Clock(told_us), lambda: runs).whole(graph)
    assert found is not None
    expected = 5e6, 1e6, 1e6
    assert (found.step_us, found.keeping_us, found.again_us) == pytest.approx(expected)
    cheaper = less_for_kept(graph, costs_of(graph), found.keeping_us)
    assert found.expected_us == cheaper[name] > 0
    assert not told_us
    assert not forward_us


def test_rounds_end_once_times_agree_that_were_taken_in_two_shares() -> None:
    """Each run takes its time twice, the first before the others; the third share has nothing."""
    round_us, forward_us = [5e6, 6e6, 1e6], [2.02e6, 2e6]
    told_us = [*(1.01 * each_us for each_us in reversed(round_us)), *round_us]
    first_us = tuple(1.3 * us for us in (*round_us, 2e6))
    made = [lambda: None] * 3
    runs = step_time.WholeRuns(*made, lambda: forward_us.pop(0), first_us=first_us)
    found = step_time.StepRounds(Clock(told_us), lambda: runs).whole(costed("plain"))
    assert found is not None
    assert (found.step_us, found.keeping_us) == pytest.approx((5e6, 1e6))
    assert not told_us


def test_a_first_run_that_takes_no_longer_counts() -> None:
    round_us = (5e6, 6e6, 1e6)
    told_us = [1.01 * each_us for each_us in reversed(round_us)]
    made, first_us = [lambda: None] * 3, (*round_us, 2e6)
    runs = step_time.WholeRuns(*made, lambda: 2.02e6, first_us=first_us)
    found = step_time.StepRounds(Clock(told_us), lambda: runs).whole(costed("plain"))
    assert found is not None
    assert found.step_us == 5e6
    assert not told_us


def test_steps_are_run_after_each_pass_over_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    some, median_us = step_time.StepRounds.some, CpuMeter.median_us

    def noted_some(rounds: step_time.StepRounds) -> None:
        events.append("step")
        some(rounds)

    def noted_median_us(meter: CpuMeter, run: Any, moved_bytes: int = 0) -> float:
        events.append("op")
        return median_us(meter, run, moved_bytes)

    monkeypatch.setattr(step_time.StepRounds, "some", noted_some)
    monkeypatch.setattr(CpuMeter, "median_us", noted_median_us)
    monkeypatch.setattr(step_time, "_MORE_SHARES", 0)  # which a busy machine asks for
    monkeypatch.setattr(op_times, "MORE_PASSES", 0)
    costed("plain")
    passes = CpuMeter().passes
    ops = (events.count("op") - 1) // passes
    assert ops > 1
    assert events == ["op", *(["op"] * ops + ["step"]) * passes]


def test_an_op_finds_a_cache_full_of_others() -> None:
    meter, filled = CpuMeter(), list[int]()
    meter.median_us(lambda: filled.append(int(meter._others[0])))
    assert filled == [(1 + i) % 256 for i in range(len(filled))]
    assert meter._others.numel() >= 2 * meter.cache_bytes > 0

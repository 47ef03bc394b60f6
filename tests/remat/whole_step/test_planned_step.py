"""Settings of a whole step as schedules: times and peaks by hand, and any config by `simulate`."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute
from remat.schedules.simulate import simulate
from remat.whole_step.planned_step import PlannedStep, Residence, Short, planned_step
from remat.whole_step.step_config import Pass, StepConfig
from tests.remat.whole_step.hand_steps import (
    BACKWARD_US,
    FORWARD_US,
    WEIGHT_BYTES,
    layered,
    random_config,
    task_of,
)

TWO = layered(2)
STATE_BYTES = 600
"""Of each of the two groups: 12 bytes a number."""


def planned(config: StepConfig, **given: float) -> PlannedStep:
    found = planned_step(task_of(TWO, **given), config, "test")  # type: ignore[arg-type]
    assert isinstance(found, PlannedStep)
    return found


def resting_bytes(graph: TrainingGraph) -> int:
    return sum(value.size_bytes for value in graph.values if value.home == "host")


def two_passes_as_one(**choices: object) -> StepConfig:
    return StepConfig((Pass(2, (0, 0)),), ("host", "host"), keeping="stream", **choices)  # type: ignore[arg-type]


def test_layer_major_without_overlap_by_hand() -> None:
    """W.0 comes (10), two forwards (20), W.1 (10), two turns (60), W.0 (10), two backwards (40).

    Then G.0 goes down (10) and the host updates (10). G.1 and its update hide behind backward.
    """
    simulation = planned(two_passes_as_one(prefetch=False)).simulation
    assert simulation.time_us == 10 + 20 + 10 + 60 + 10 + 40 + 10 + 10
    assert simulation.busy_us["device"] == 2 * 2 * (FORWARD_US + BACKWARD_US)
    assert simulation.moved_bytes["h2d"] == 3 * WEIGHT_BYTES
    assert simulation.moved_bytes["d2h"] == 2 * WEIGHT_BYTES


def test_layer_major_with_prefetch_by_hand() -> None:
    """Only the first W.0 and the last G.0 with its update are waited for: 10 + 120 + 10 + 10."""
    assert planned(two_passes_as_one()).simulation.time_us == 150


def test_peaks_by_hand() -> None:
    """The device's is at the second turn, whose workspace of 130 holds a gradient that is added.

    Beside it are W.1 and G.1, one x, two S, two d; with prefetch W.0 too. The host holds both W,
    both O and the one G that it updates with.
    """
    plain, ahead = (planned(two_passes_as_one(prefetch=p)).simulation for p in (False, True))
    assert plain.peak_bytes == WEIGHT_BYTES + WEIGHT_BYTES + 10 + 2 * 40 + 2 * 10 + 130
    assert ahead.peak_bytes == plain.peak_bytes + WEIGHT_BYTES
    for simulation in (plain, ahead):
        assert simulation.host_peak_bytes == 2 * (WEIGHT_BYTES + STATE_BYTES) + WEIGHT_BYTES


def test_a_state_on_nvme_comes_up_and_goes_down_again() -> None:
    """Read, update, write, with the second read beside the first update and write if there is room.

    The first state is read before its gradient is there. Where the host holds both W, one O and
    one G, the second waits until the first is written.
    """
    config = msgspec.structs.replace(two_passes_as_one(), state=("nvme", "nvme"), slots=1)
    roomy = planned(config, nvme_per_us=1.0).simulation
    assert roomy.moved_bytes["read"] == roomy.moved_bytes["write"] == 2 * STATE_BYTES
    assert roomy.time_us == 600 + 600 + 10 + 600
    tight = planned(config, nvme_per_us=1.0, host_bytes=900).simulation
    assert tight.time_us == (600 + 10 + 600) + (600 + 10 + 600)


def test_a_whole_step_on_the_device_copies_nothing() -> None:
    config = StepConfig((Pass(1, (0, 0)),) * 2, ("device", "device"))
    simulation = planned(config).simulation
    assert not any(simulation.moved_bytes.values())
    update_us = 28 * 50 / (100.0 * 1e3)
    assert simulation.time_us == pytest.approx(120 + 2 * update_us)


def test_what_does_not_fit_names_the_tier_and_what_would_do() -> None:
    config = two_passes_as_one()
    short = planned_step(task_of(TWO, budget_bytes=439), config, "test")
    assert short == Short("device", 440)
    assert isinstance(planned_step(task_of(TWO, budget_bytes=440), config, "test"), PlannedStep)
    short = planned_step(task_of(TWO, host_bytes=1499), config, "test")
    assert short == Short("host", 1500)
    assert isinstance(planned_step(task_of(TWO, host_bytes=1500), config, "test"), PlannedStep)


@pytest.mark.parametrize("n_layers", [2, 3, 5])
def test_any_setting_is_a_valid_schedule_with_the_peaks_that_were_foretold(n_layers: int) -> None:
    """The simulator takes all steps; no copy raises the device's peak above that of the events."""
    microbatch, judged = layered(n_layers), 0
    for seed in range(120):
        config = random_config(seed, microbatch)
        least = Residence(task_of(microbatch, nvme_per_us=1.0, budget_bytes=0), config).peak_bytes
        task = task_of(microbatch, nvme_per_us=1.0, budget_bytes=least + 50 * (seed % 4))
        found = planned_step(task, config, "test")
        assert isinstance(found, PlannedStep), (seed, found)
        assert found.simulation.peak_bytes <= task.budget_bytes
        least_bytes = found.simulation.host_peak_bytes  # of any host that has room
        larger = msgspec.structs.replace(task.links, host_bytes=1 << 60)
        assert simulate(found.graph, found.schedule, larger).host_peak_bytes == least_bytes
        if resting := resting_bytes(found.graph):
            links = msgspec.structs.replace(task.links, host_bytes=resting - 1)
            short = planned_step(replace(task, links=links), config, "test")
            assert isinstance(short, Short)
            assert (short.tier, short.need_bytes >= resting) == ("host", True)
        judged += 1
    assert judged == 120


def test_gradients_are_added_in_the_order_of_the_microbatches() -> None:
    """In eager's order their sum has eager's bits, wherever it is made."""
    microbatch = layered(4)
    for seed in range(60):
        found = planned_step(
            task_of(microbatch, nvme_per_us=1.0), random_config(seed, microbatch), "test"
        )
        assert isinstance(found, PlannedStep)
        added: dict[tuple[str, str], list[int]] = {}
        for step in found.schedule.steps:
            if isinstance(step, Compute) and not step.op.startswith("update."):
                kind, at, i = step.op.split(".")
                added.setdefault((kind, at), []).append(int(i))
        assert all(order == sorted(order) for order in added.values())

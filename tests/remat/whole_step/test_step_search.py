"""The search for a whole step: it beats what it is compared with, and says what is too small."""

from __future__ import annotations

import functools
import random

import msgspec
import pytest

from remat.graph_capture.devices.known_devices import device_table
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Link, Links
from remat.schedules.simulate import simulate
from remat.whole_step.config_changes import orders
from remat.whole_step.layers import microbatch_of
from remat.whole_step.microbatch import Microbatch, Update
from remat.whole_step.planned_step import PlannedStep, Short, StepTask, planned_step
from remat.whole_step.step_config import NAMED_SYSTEMS, Pass, StepConfig
from remat.whole_step.step_search import least_step_us, plan_whole_step
from tests.remat.whole_step.hand_steps import layered, task_of
from tests.remat.whole_step.llama import captured, small_llama

FOUR = layered(4)
TIGHT = task_of(FOUR, budget_bytes=800, bytes_per_us=20.0)


def test_the_plan_fits_and_is_no_slower_than_any_named_system() -> None:
    found = plan_whole_step(TIGHT, 4, most=60)
    assert found.plan is not None
    assert found.plan.simulation.peak_bytes <= 800
    assert found.lower_bound_us <= found.plan.simulation.time_us
    judged = [one for one in found.systems.values() if isinstance(one, PlannedStep)]
    assert len(judged) >= 3
    assert all(found.plan.simulation.time_us <= one.simulation.time_us for one in judged)


def test_strongholds_window_is_the_least_of_the_fastest() -> None:
    found = plan_whole_step(TIGHT, 4, most=1).systems["stronghold"]
    assert isinstance(found, PlannedStep)
    configs = [TIGHT.feasible(one) for one in NAMED_SYSTEMS["stronghold"].configs(FOUR, 4)]
    planned = [planned_step(TIGHT, one, "") for one in configs]
    times = {one.config.window: one.simulation.time_us
             for one in planned if isinstance(one, PlannedStep)}  # fmt: skip
    assert len(set(times.values())) > 1
    fastest_us = min(times.values())
    assert found.simulation.time_us == fastest_us
    assert found.config.window == min(w for w, us in times.items() if us == fastest_us)


def test_the_same_search_gives_the_same_plan() -> None:
    first, second = (plan_whole_step(TIGHT, 3, most=40) for _ in range(2))
    assert first.plan is not None
    assert second.plan is not None
    assert first.plan.schedule == second.plan.schedule
    assert first.judged == second.judged <= 40


def test_with_room_for_all_the_step_stays_on_the_device_and_meets_its_bound() -> None:
    """A host this slow has no part in it."""
    found = plan_whole_step(task_of(FOUR, host_gb_s=1e-4), 2, most=20)
    assert found.plan is not None
    assert set(found.plan.config.state) == {"device"}
    assert found.plan.simulation.stall_us == 0
    updates_us = sum(op.cost_us for op in found.plan.graph.ops if op.phase == "update")
    assert found.plan.simulation.time_us == pytest.approx(found.lower_bound_us + updates_us)


def test_state_beyond_the_host_goes_to_nvme_and_the_bound_knows() -> None:
    """Four groups of 700 bytes at rest, 800 and 900 above: 1,100 are read and written."""
    task = task_of(FOUR, budget_bytes=800, host_bytes=900, nvme_per_us=0.5)
    assert least_step_us(task, 1) == (2800 - 900 - 800) / 0.5
    found = plan_whole_step(task, 2, most=30)
    assert found.plan is None
    roomy = task_of(FOUR, budget_bytes=800, host_bytes=1600, nvme_per_us=0.5)
    plan = plan_whole_step(roomy, 2, most=60).plan
    assert plan is not None
    assert "nvme" in plan.config.state
    assert plan.simulation.host_peak_bytes <= 1600


@pytest.mark.parametrize(("tier", "given"), [("host", 500), ("device", 200)])
def test_a_tier_that_is_too_small_is_named_with_what_does(tier: str, given: int) -> None:
    def found_with(room_bytes: int) -> PlannedStep | Short | None:
        rooms = {"budget_bytes": 800, "host_bytes": 1 << 40} | {
            "budget_bytes" if tier == "device" else "host_bytes": room_bytes
        }
        found = plan_whole_step(task_of(FOUR, **rooms), 2, most=40)
        return found.plan or found.short

    short = found_with(given)
    assert isinstance(short, Short)
    assert short.tier == tier
    assert short.need_bytes > given
    assert isinstance(found_with(short.need_bytes), PlannedStep)


@functools.cache
def microbatch(layers: int, vocabulary: int) -> Microbatch:
    """Of a Llama whose head may be far larger than its layers."""
    return microbatch_of(captured(**small_llama(LAYERS=layers, VOCAB=vocabulary)))


def any_task(draw: random.Random) -> StepTask:
    """A device of the table, with links and rooms that may be too slow and too small."""
    step = microbatch(draw.choice((2, 3)), draw.choice((96, 4000)))
    device = draw.choice(list(device_table().devices))
    update = Update.on(device, draw.choice(("sgd", "adamw")), draw.choice(("float32", "parameter")))
    resting = sum(one.parameter_bytes + update.state_bytes(one) for one in step.groups)
    device_bytes, host_bytes, nvme_bytes = (
        int(resting * 10 ** draw.uniform(-1, 0.7)) for _ in range(3)
    )
    link, disk = (Link(10 ** draw.uniform(1, 5), draw.choice((0.0, 4.0))) for _ in range(2))
    way = disk if draw.random() < 0.5 else None
    below = Links(link, link, host_bytes, way, way, nvme_bytes if way else 0)
    return StepTask(step, update, below, device_bytes, host_computes=draw.random() < 0.8)


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 84))]
)
def test_any_search_gives_a_valid_plan_or_says_what_is_too_small(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        task = any_task(draw)
        found = plan_whole_step(
            task, round(16 ** draw.random()), most=12
        )  # raises if one is invalid
        if found.plan is None:
            assert found.short is not None
            rooms = {"device": task.budget_bytes, "host": task.links.host_bytes}
            assert found.short.need_bytes > rooms[found.short.tier]
        else:
            assert simulate(found.plan.graph, found.plan.schedule) == found.plan.simulation
            assert found.plan.simulation.peak_bytes <= task.budget_bytes
            assert found.plan.simulation.host_peak_bytes <= task.links.host_bytes


def test_orders_are_ways_to_cut_the_microbatches() -> None:
    assert orders(1) == [(1,)]
    assert (1, 1, 1, 1) in orders(4)
    assert (4,) in orders(4)
    assert (1, 1, 2) in orders(4)
    assert all(sum(order) == 8 for order in orders(8))
    assert len(set(orders(8))) == len(orders(8))


def test_where_forward_draws_microbatches_run_one_after_the_other() -> None:
    drawing = msgspec.structs.replace(FOUR, draws=True)
    found = plan_whole_step(task_of(drawing, budget_bytes=800, bytes_per_us=20.0), 3, most=30)
    assert found.plan is not None
    assert all(one.microbatches == 1 for one in found.plan.config.passes)
    assert "draw random numbers in turn" in str(found.systems["l2l"])
    assert isinstance(found.systems["zero-infinity"], PlannedStep)


def test_an_empty_step_and_an_empty_search_are_refused() -> None:
    with pytest.raises(SolverError, match="ask for 1 microbatch"):
        plan_whole_step(TIGHT, 0)
    with pytest.raises(SolverError, match="1 plan or more"):
        plan_whole_step(TIGHT, 1, most=0)


def test_systems_have_sources() -> None:
    assert all("20" in system.source for system in NAMED_SYSTEMS.values())


def test_a_setting_counts_its_microbatches() -> None:
    config = StepConfig((Pass(1, (0,) * 4), Pass(3, (0,) * 4)), ("host",) * 4)
    assert config.microbatches == 4

"""Whole steps of one rank of several: shards, collectives, and a share of the machine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remat.graph_capture.devices.known_devices import links_between_ranks
from remat.graph_capture.devices.links import RankLinks
from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.graph import Link, Links
from remat.whole_step.microbatch import Microbatch, Ranks
from remat.whole_step.planned_step import PlannedStep, StepTask, planned_step
from remat.whole_step.rank_share import beside_collectives, ranks_of, share_of
from remat.whole_step.step_config import Pass, StepConfig, full_recompute
from remat.whole_step.step_planning import StepPlan, StepRequest, planned_from
from remat.whole_step.step_search import plan_whole_step
from tests.remat.whole_step.hand_steps import (
    FREE,
    WEIGHT_BYTES,
    layered,
    random_config,
    task_of,
)
from tests.remat.whole_step.llama import captured, small_llama

RANKS, LAYERS = 4, 5
LINKS = RankLinks(0.01, 0.01, 1.0, 1.0, 0.0, 1.0, "by hand")
"""10 bytes a microsecond, after one."""
COLLECTIVE_US = 1 + WEIGHT_BYTES * (RANKS - 1) / RANKS / 10


def over_ranks(*, keeps_whole: bool = False) -> Microbatch:
    whole = layered(LAYERS)
    ranks = Ranks(RANKS, RANKS, LINKS, keeps_whole=keeps_whole)
    shards = tuple(
        replace(
            one, trained=-(-one.trained // RANKS), parameter_bytes=WEIGHT_BYTES // RANKS,
            gradient_bytes=WEIGHT_BYTES // RANKS, whole_parameter_bytes=WEIGHT_BYTES,
            whole_gradient_bytes=WEIGHT_BYTES,
        )
        for one in whole.groups
    )  # fmt: skip
    return replace(whole, groups=shards, ranks=ranks)


def planned(task: StepTask, *passes: int) -> PlannedStep:
    options = full_recompute(task.microbatch)
    each = tuple(Pass(count, options) for count in passes)
    config = StepConfig(each, ("host",) * LAYERS, keeping="stream")
    found = planned_step(task, config, "test")
    assert isinstance(found, PlannedStep)
    return found


@pytest.mark.parametrize(("passes", "gathers"), [((1,), 1), ((1, 1), 2), ((2,), 1)])
@pytest.mark.parametrize("keeps_whole", [False, True])
def test_each_layer_is_gathered_once_a_pass_and_way(
    passes: tuple[int, ...], gathers: int, keeps_whole: bool
) -> None:
    """Forward and backward of the last layer are one op; gradients are reduced each time."""
    microbatch, count = over_ranks(keeps_whole=keeps_whole), sum(passes)
    found = planned(task_of(microbatch, bytes_per_us=1e9), *passes)
    again_us = sum(
        layer.options[at].extra_us
        for layer, at in zip(microbatch.layers, full_recompute(microbatch), strict=True)
    )
    each = LAYERS if keeps_whole else 2 * LAYERS - 1
    expected_us = count * (microbatch.least_us + again_us)
    expected_us += COLLECTIVE_US * (gathers * each + count * LAYERS)
    # Each gradient after a layer's first is added on the device, at 100 GB/s.
    expected_us += (count - 1) * LAYERS * 3 * WEIGHT_BYTES / RANKS / 100e3
    assert found.simulation.busy_us["device"] == pytest.approx(expected_us)
    # Copies move shards alone.
    assert found.simulation.moved_bytes["h2d"] % (WEIGHT_BYTES // RANKS) == 0


def test_more_ranks_hold_less_between_steps() -> None:
    one, several = (planned(task_of(each), 1) for each in (layered(LAYERS), over_ranks()))
    rest = [
        sum(v.size_bytes for v in found.graph.values if v.home == "host")
        for found in (one, several)
    ]
    assert rest[1] * RANKS == pytest.approx(rest[0], rel=0.05)  # 50 numbers are no multiple of 4


@pytest.mark.parametrize("seed", range(24))
def test_any_config_of_a_rank_is_judged_valid(seed: int) -> None:
    microbatch = over_ranks(keeps_whole=seed % 3 == 0)
    roomy = task_of(microbatch, nvme_per_us=1.0)
    config = random_config(seed, microbatch)
    found: Any = planned_step(roomy.with_rooms({"device": 1}), config, "least")
    budget_bytes = found.need_bytes + 20 * (seed % 4)
    found = planned_step(roomy.with_rooms({"device": budget_bytes}), config, "test")
    assert isinstance(found, PlannedStep)
    assert found.simulation.peak_bytes <= budget_bytes


def test_the_search_is_no_slower_than_a_system() -> None:
    result = plan_whole_step(task_of(over_ranks(), host_bytes=3_000), 2)
    assert result.plan is not None
    times = [one.simulation.time_us for one in result.systems.values()
             if isinstance(one, PlannedStep)]  # fmt: skip
    assert times
    assert result.lower_bound_us <= result.plan.simulation.time_us <= min(times)


def test_ranks_of_a_machine_share_its_tiers_and_its_memory() -> None:
    way, drive = Link(25e3, 4.0), Link(12e3, 120.0)
    machine = Links(way, way, 64 << 30, drive, drive, 4 << 40)
    ranks = Ranks(16, 8, LINKS)
    share = share_of(ranks, machine, 60.0)
    assert (share.host_bytes, share.nvme_bytes) == (8 << 30, 512 << 30)
    assert share.read == share.write == Link(1.5e3, 120.0)
    assert share.h2d == share.d2h == Link(7.5e3, 4.0)  # an eighth of 60 GB/s
    assert share_of(ranks, machine, 1e6).h2d == way


@pytest.mark.parametrize(("device", "over_host"), [("rtx4090", True), ("h100", False)])
def test_collectives_that_go_over_the_host_leave_less_to_copies(
    device: str, over_host: bool
) -> None:
    sharding = Sharding("fsdp2", world_size=4)
    ranks = ranks_of(sharding, device, links_between_ranks(device), 60.0)
    assert ranks is not None
    assert ranks.over_host == over_host
    assert (ranks.links.inside_gb_s == 15.0) == over_host
    links = Links(Link(10.0), Link(10.0), FREE)
    left = beside_collectives(links, replace(over_ranks(), ranks=ranks))
    assert (left.h2d.bytes_per_us < 10.0) == over_host


@pytest.mark.parametrize(
    ("sharding", "says"),
    [
        (Sharding("ddp", 2), "choose the sharding fsdp2, or leave out microbatches="),
        (Sharding("fsdp2", 4, replicas=2), "leave out replicas of the sharding"),
        (Sharding("fsdp2", 2, blocks="layers.*"), "leave out blocks of the sharding"),
        (Sharding("fsdp2", 2, cpu_offload=True), "leave out cpu_offload of the sharding"),
        (Sharding("fsdp2", 1), "choose 2 or more ranks, and reshard_after_forward yes or no"),
        (Sharding("fsdp2", 4, reshard_after_forward=2), "in shards, not 2"),
    ],
)
def test_other_ways_to_shard_are_refused(sharding: Sharding, says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        StepRequest("rtx4090", 1, "adamw", host="1GiB", sharding=sharding)


def test_two_ranks_of_a_llama() -> None:
    graph = captured(**small_llama())

    def plan(ranks: int, host: int) -> StepPlan:
        sharding = Sharding("fsdp2", ranks) if ranks > 1 else Sharding()
        request = StepRequest("rtx4090", 2, "adamw", "2MiB", host, sharding=sharding)
        return planned_from(graph, request)

    one, two = plan(1, 1 << 30), plan(2, 1 << 30)
    assert two.task.links.host_bytes == (1 << 30) // 2
    moved = [sum(one.simulation.moved_bytes.values()) for one in (one, two)]
    assert moved[1] < moved[0]
    # Tokens are those of both ranks.
    ratio = two.tokens_per_s(two.simulation) / one.tokens_per_s(one.simulation)
    assert ratio == pytest.approx(2 * one.simulation.time_us / two.simulation.time_us)

"""The simulator's clocks against a model of tasks, on random schedules over three tiers."""

from __future__ import annotations

import random

import msgspec
import pytest

from remat.graph_capture.graph import Links, TrainingGraph
from remat.schedules.schedule import Free, Schedule, Step
from remat.schedules.simulate import Simulation, simulate
from tests.schedules.simulator.longest_path import LongestPath
from tests.schedules.simulator.moving_walks import MovingWalk, moving_graph

SEEDS = [range(250), pytest.param(range(250, 3250), marks=pytest.mark.slow)]


def walk(seed: int) -> tuple[TrainingGraph, list[Step]]:
    source = random.Random(seed)
    graph = moving_graph(source)
    return graph, MovingWalk(graph, source).run()


def check_as_the_model(graph: TrainingGraph, steps: list[Step], links: Links) -> Simulation:
    """Time is the longest path, and no more bytes are in use than the order of steps says."""
    found = simulate(graph, Schedule.for_graph(graph, steps), links)
    model = LongestPath(graph, links)
    assert found.time_us == model.run(steps)
    in_use = model.most_used_bytes("device") + graph.resident.total_bytes
    assert in_use <= found.peak_bytes
    assert model.most_used_bytes("host") <= links.host_bytes
    assert model.most_used_bytes("nvme") <= links.nvme_bytes
    return found


@pytest.mark.parametrize("seeds", SEEDS, ids=["quick", "slow"])
def test_time_is_the_longest_path_and_bytes_in_use_stay_below_the_peak(seeds: range) -> None:
    with_copies = with_stalls = on_host = later = 0
    for seed in seeds:
        graph, steps = walk(seed)
        assert graph.links is not None
        found = check_as_the_model(graph, steps, graph.links)
        with_copies += any(found.moved_bytes.values())
        with_stalls += bool(found.stalls)
        on_host += found.busy_us["host"] > 0
        for spare in (0, 2000):
            host, nvme = found.host_peak_bytes + spare, found.nvme_peak_bytes + spare
            tight = msgspec.structs.replace(graph.links, host_bytes=host, nvme_bytes=nvme)
            close = check_as_the_model(graph, steps, tight)
            assert close.time_us >= found.time_us
            assert close.peak_bytes == found.peak_bytes
            assert close.live_bytes == found.live_bytes
            later += close.time_us > found.time_us
    assert min(with_copies, with_stalls, on_host, later) > len(seeds) // 50


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 3.0])
def test_no_peak_depends_on_how_fast_a_link_is(share: float) -> None:
    for seed in range(40):
        graph, steps = walk(seed)
        assert graph.links is not None
        schedule = Schedule.for_graph(graph, steps)
        found, other = (
            simulate(graph, schedule),
            simulate(graph, schedule, graph.links.slower(share)),
        )
        assert found.live_bytes == other.live_bytes
        assert found.host_peak_bytes == other.host_peak_bytes
        assert found.nvme_peak_bytes == other.nvme_peak_bytes
        assert (other.time_us - found.time_us) * (1 - share) >= 0


def test_a_device_waits_only_for_what_a_stall_names() -> None:
    """Its clock is its work and its waits, to the bit."""
    for seed in range(100):
        graph, steps = walk(seed)
        found = simulate(graph, Schedule.for_graph(graph, steps))
        at_host = {i for i, step in enumerate(steps) if getattr(step, "at", "device") == "host"}
        waits = sum(stall.us for stall in found.stalls if stall.step not in at_host)
        assert found.clock_us[-1] == found.busy_us["device"] + waits
        assert all(stall.us > 0 for stall in found.stalls)
        assert not any(isinstance(steps[i], Free) for i in at_host & {s.step for s in found.stalls})

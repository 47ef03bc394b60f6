"""Traces to hold the replay against torch's library with, and the settings to do it under."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from remat.formats import MIB
from remat.schedules.caching_allocator import UNLIMITED_BYTES, AllocatorSettings
from remat.schedules.layout import buffers_of
from remat.schedules.reserved import EMPTY_CACHE, trace_of_steps
from remat.schedules.schedule import Schedule
from remat.solver import solve_within
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import chain, gpt_like, resnet_like, unet_like

SETTINGS = {
    "default": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "roundup": AllocatorSettings(roundup_power2_divisions=8),
    "max_split": AllocatorSettings(max_split_bytes=128 * MIB),
    "max_split_and_rounding": AllocatorSettings(
        max_split_bytes=64 * MIB, max_non_split_rounding_bytes=40 * MIB
    ),
    "large_segment": AllocatorSettings(large_segment_bytes=64 * MIB),
    "expandable_roundup": AllocatorSettings(expandable_segments=True, roundup_power2_divisions=4),
    "expandable_large_segment": AllocatorSettings(
        expandable_segments=True, large_segment_bytes=64 * MIB
    ),
}
CAPACITIES_BYTES = (UNLIMITED_BYTES, UNLIMITED_BYTES, 8192 * MIB, 2048 * MIB, 512 * MIB)
LARGEST_BYTES = (4 << 10, 256 << 10, 2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
EDGES_BYTES = (
    1, 512, MIB, MIB + 1, 2 * MIB, 3 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 64 * MIB, 128 * MIB,
)  # fmt: skip
"""Sizes at which the rules change."""
SOLVERS = ("store_all", "chen_sqrt", "dtr", "revolve", "msps")
DIVISORS = (1, 37)
"""Of the sizes of made-up graphs, so that values are large, small, and both."""


def random_trace(source: random.Random, n_events: int) -> list[int]:
    """Requests and frees in no order, some caches emptied, sizes at and between the edges."""
    largest, power = source.choice(LARGEST_BYTES), source.choice((1, 3))
    trace, used, n_requests = list[int](), list[int](), 0
    for _ in range(n_events):
        draw = source.random()
        if draw < 0.01:
            trace.append(EMPTY_CACHE)
        elif used and draw < 0.48:
            trace.append(~used.pop(source.randrange(len(used))))
        else:
            is_edge = source.random() < 0.3
            any_size = 1 + int(largest * source.random() ** power)
            trace.append(source.choice(EDGES_BYTES) if is_edge else any_size)
            used.append(n_requests)
            n_requests += 1
    return trace


def random_traces(count: int, seed: int = 0) -> Iterator[tuple[list[int], int]]:
    """Traces, each with the bytes of a device, on which some of them do not fit."""
    source = random.Random(seed)
    for _ in range(count):
        yield random_trace(source, source.choice((50, 200, 600))), source.choice(CAPACITIES_BYTES)


def step_traces() -> Iterator[list[int]]:
    """Three steps each of plans for made-up networks: 40 traces."""
    graphs = (chain(20), gpt_like(3), unet_like(3), resnet_like(6))
    for graph, solver, divisor in itertools.product(graphs, SOLVERS, DIVISORS):
        result = solve_within(graph, int(0.7 * peak_bytes_of(graph)), solver, time_limit_s=AMPLE_S)
        schedule = result.schedule or result.least_schedule
        assert isinstance(schedule, Schedule)
        one = trace_of_steps(buffers_of(graph, schedule), n_steps=3)
        yield [-(-event // divisor) if event > 0 else event for event in one]

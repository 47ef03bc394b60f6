"""The replay of the allocator: torch's own figures of kept traces, and each rule by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from remat.formats import MIB
from remat.schedules.caching_allocator import AllocatorSettings, CachingAllocator
from remat.schedules.layout import Buffers
from remat.schedules.reserved import EMPTY_CACHE, AllocatorReplay, serve_trace, trace_of_steps
from tests.schedules.allocator.goldens import Golden, goldens
from tests.schedules.allocator.traces import SETTINGS, random_trace

USUAL = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("golden", goldens(), ids=lambda golden: f"{len(golden.trace)}_events")
def test_kept_traces_have_torchs_own_figures(golden: Golden, name: str) -> None:
    assert serve_trace(golden.trace, golden.settings(name)) == golden.torchs[name]


def test_the_kept_traces_tell_the_settings_apart_and_some_run_out_of_memory() -> None:
    figures = {name: [golden.torchs[name] for golden in goldens()] for name in SETTINGS}
    assert len({str(said) for said in figures.values()}) == len(SETTINGS)
    n_failed = sum(one.failed_request is not None for said in figures.values() for one in said)
    assert 0 < n_failed < len(goldens()) * len(SETTINGS) / 2


def reserved_mib(trace: list[int], settings: AllocatorSettings = USUAL) -> float:
    return serve_trace(trace, settings).peak_reserved_bytes / MIB


def test_segments_are_small_shared_or_of_their_own_size() -> None:
    assert reserved_mib([1]) == 2
    assert reserved_mib([MIB]) == 2
    assert reserved_mib([MIB + 1]) == 20
    assert reserved_mib([10 * MIB - 512]) == 20
    assert reserved_mib([10 * MIB]) == 10
    assert reserved_mib([11 * MIB]) == 12
    assert reserved_mib([11 * MIB], EXPANDABLE) == 20


def test_a_freed_block_serves_again_and_is_split() -> None:
    assert reserved_mib([30 * MIB, ~0, 12 * MIB, 12 * MIB]) == 30
    assert reserved_mib([30 * MIB, ~0, 12 * MIB, 20 * MIB]) == 50


def test_free_neighbours_join() -> None:
    apart = [8 * MIB, 8 * MIB, ~0, ~1]
    assert reserved_mib([*apart, 16 * MIB]) == 20
    assert reserved_mib([*apart[:-1], 16 * MIB]) == 36


def test_expandable_segments_grow_where_fixed_ones_fragment() -> None:
    """Two segments of 30 MiB hold no block of 60, one range does."""
    trace = [30 * MIB, 30 * MIB, ~0, ~1, 60 * MIB]
    assert reserved_mib(trace) == 120
    assert reserved_mib(trace, EXPANDABLE) == 60


def test_an_emptied_cache_keeps_what_is_used() -> None:
    said = serve_trace([30 * MIB, 12 * MIB, ~0, EMPTY_CACHE], USUAL)
    assert (said.peak_reserved_bytes, said.reserved_bytes) == (42 * MIB, 12 * MIB)


def test_a_full_device_takes_free_segments_back_before_a_request_fails() -> None:
    settings = AllocatorSettings(capacity_bytes=50 * MIB)
    trace = [30 * MIB, ~0, 40 * MIB]
    assert serve_trace(trace, settings) == AllocatorReplay(
        40 * MIB, 40 * MIB, 40 * MIB, n_retries=1
    )
    failed = serve_trace([*trace, MIB, 12 * MIB, 1], settings)
    assert failed == AllocatorReplay(41 * MIB, 42 * MIB, 42 * MIB, n_retries=2, failed_request=3)


def test_sizes_round_to_512_bytes_or_to_divisions_of_powers_of_two() -> None:
    assert [USUAL.block_bytes(n) for n in (1, 512, 513)] == [512, 512, 1024]
    eighths = AllocatorSettings(roundup_power2_divisions=8)
    assert eighths.block_bytes(8 * MIB) == 8 * MIB
    assert eighths.block_bytes(8 * MIB + 1) == 9 * MIB
    assert eighths.block_bytes(4000) == 4096


def test_blocks_that_are_not_split_are_kept_for_large_requests() -> None:
    settings = AllocatorSettings(max_split_bytes=64 * MIB)
    assert reserved_mib([80 * MIB, ~0, 12 * MIB], settings) == 92
    assert reserved_mib([80 * MIB, ~0, 70 * MIB], settings) == 80
    assert reserved_mib([128 * MIB, ~0, 70 * MIB], settings) == 198


@pytest.mark.parametrize("name", SETTINGS)
def test_all_that_is_used_is_reserved_and_comes_back(name: str) -> None:
    source = random.Random(3)
    for _ in range(20):
        allocator, used = CachingAllocator(SETTINGS[name]), dict[int, tuple[int, int]]()
        blocks = []
        for event in random_trace(source, 200):
            if event > 0:
                blocks.append(allocator.malloc(event))
                used[len(blocks) - 1] = (blocks[-1].address, blocks[-1].size)
                assert blocks[-1].size >= event
            elif event < 0:
                allocator.free(blocks[~event])
                del used[~event]
            else:
                allocator.empty_cache()
            assert sum(size for _, size in used.values()) == allocator.allocated_bytes
            assert allocator.allocated_bytes <= allocator.reserved_bytes
        ranges = sorted(used.values())
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
        for i in used:
            allocator.free(blocks[i])
        allocator.empty_cache()
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_the_trace_of_steps_frees_before_it_asks() -> None:
    buffers = Buffers.of_arrays([10, 20, 30], [0, 0, 1], [1, 3, 2])
    one = [10, 20, ~0, 30, ~2, ~1]
    assert trace_of_steps(buffers) == one
    assert trace_of_steps(buffers, n_steps=2) == [*one, 10, 20, ~3, 30, ~5, ~4]


def test_no_buffers_make_no_trace() -> None:
    assert trace_of_steps(Buffers.of_arrays([], [], []), n_steps=3) == []
    assert serve_trace([], USUAL) == AllocatorReplay(0, 0, 0)

"""What a CPU run really allocates: the profiler's allocation events, in time order."""

from __future__ import annotations

import gc
import os
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from torch.autograd.profiler import profile

from remat.graph_capture.torch_private.core import (
    RecordFunctionFast,
    RecordScope,
    disable_profiler,
    enable_profiler,
    prepare_profiler,
)

RUNS = 40  # steps of which one is looked for whose frees before the peak were all seen
_MARK = "remat::region::"


@dataclass(frozen=True)
class RegionMemory:
    """Allocations during one region: highest and final live bytes above its start."""

    peak_bytes: int
    final_bytes: int


class Moment(NamedTuple):
    """A moment of a step that it has named, in bytes above what was live when it began."""

    name: str
    live_bytes: int
    peak_bytes: int  # the most since the moment before


def measure_regions(regions: Iterable[Callable[[], Any]]) -> list[RegionMemory]:
    """Run each callable under one profiler, and account for its allocations alone; CPU only. What a
    callable returns is in `final_bytes`; what the iterable allocates counts for none."""
    deltas, spans = _watched(regions)
    times, found = [time for time, _ in deltas], list[RegionMemory]()
    for start_ns, end_ns in (spans[str(i)] for i in range(len(spans))):
        sizes = deltas[bisect_left(times, start_ns) : bisect_left(times, end_ns)]
        live = [0, *accumulate(size for _, size in sizes)]
        found.append(RegionMemory(max(live), live[-1]))
    return found


def measure_live(run: Callable[[], Any]) -> tuple[list[int], list[int]]:
    """Moments of `run`, in ns from 0 to its end; and from each on, bytes live above its start."""
    deltas, spans = _watched([run])
    start_ns, end_ns = spans["0"]
    inside = [(time, size) for time, size in deltas if start_ns <= time < end_ns]
    live = [0, *accumulate(size for _, size in inside)]
    return [0, *(time - start_ns for time, _ in inside), end_ns - start_ns], [*live, live[-1]]


def measure_moments(run: Callable[[Callable[[str], None]], Any]) -> list[Moment]:
    """The moments that `run` names by the function it is given, in their order, and its end; the
    names are distinct. CPU only."""

    def mark(name: str) -> None:
        with RecordFunctionFast(f"{_MARK}{name}"):
            pass

    deltas, spans = _watched([lambda: run(mark)])
    whole = spans.pop("0")
    ends = sorted((start_ns, name) for name, (start_ns, _) in spans.items())
    times, found = [time for time, _ in deltas], list[Moment]()
    at, live = bisect_left(times, whole[0]), 0
    for end_ns, name in (*ends, (whole[1], "end")):
        until = bisect_left(times, end_ns)
        levels = [live, *(live + size for size in accumulate(size for _, size in deltas[at:until]))]
        at, live = until, levels[-1]
        found.append(Moment(name, live, max(levels)))
    return found


def _watched(
    regions: Iterable[Callable[[], Any]],
) -> tuple[list[tuple[int, int]], dict[str, tuple[int, int]]]:
    """Allocations in the order of their times, in ns and bytes, and the span of each region."""
    # Garbage that is collected meanwhile was live before: it would count as given back.
    with without_garbage(), _without_its_log(), _ops_profiled() as found:
        for i, region in enumerate(regions):
            with RecordFunctionFast(f"{_MARK}{i}"):
                kept = region()  # kept to the mark: what it returns is live at the end
            del kept, region
    spans, deltas = dict[str, tuple[int, int]](), list[tuple[int, int]]()
    for event in found[0].events():
        name = event.name()
        if name == "[memory]":
            deltas.append((event.start_ns(), event.nbytes()))  # pyright: ignore[reportAttributeAccessIssue]
        elif name.startswith(_MARK):
            start = event.start_ns()
            spans[name.removeprefix(_MARK)] = (start, start + event.duration_ns())
    deltas.sort(key=lambda delta: delta[0])
    return deltas, spans


@contextmanager
def _ops_profiled() -> Generator[list[Any]]:
    """Profile this thread; the list has the profiler's results once the block has ended."""
    asked: Any = profile(use_cpu=True, use_kineto=True, profile_memory=True)
    activities = asked.kineto_activities
    prepare_profiler(asked.config(create_trace_id=True), activities)
    # Ops alone: where ``profile`` also records gloo's collectives (``USER_SCOPE``), torch wakes who
    # waits before gloo's thread ends its record. The profiler may have freed that by then, and
    # memory is written that is no longer its own. Seen with torch alone, 2.11 to 2.14.
    enable_profiler(asked.config(), activities, {RecordScope.FUNCTION})
    found: list[Any] = []
    try:
        yield found
    finally:
        found.append(disable_profiler())


@contextmanager
def _without_its_log() -> Generator[None]:
    """Keep the profiler from writing each start and stop to standard error."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"  # read as the profiler first starts
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


@contextmanager
def without_garbage() -> Generator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def measure_peak(run: Callable[[], Any]) -> int:
    return measure_regions([run])[0].peak_bytes


def measure_rank_peak(run: Callable[[], Any], reset: Callable[[], Any], runs: int = RUNS) -> int:
    """As `measure_peak`, on every rank, for a step that communicates through gloo. `reset`, before
    each step, has to drop the gradients."""
    seen: list[RegionMemory] = []
    for _ in range(runs):
        reset()
        seen.extend(measure_regions([run]))
    return min(memory.peak_bytes for memory in seen)  # later ones look higher: gloo frees unseen

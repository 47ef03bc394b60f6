"""How a CPU is measured: by its clock, and by the profiler's allocation events.

It has no counter of its own for memory, and modes that watch tensors miss workspaces.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import statistics
import time
from collections.abc import Generator
from pathlib import Path

import torch
from torch import Tensor

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.memory_events import measure_peak, measure_regions
from remat.graph_capture.devices.meter import PASSES, LoadAwareTimer, Run, StepMemory, median_of

_TRIED_S, _QUIET = 0.05, 0.02  # seconds to try a core, and the part others may have had it
_OFTEN, _APART_S = 9, 0.1  # times of `CpuMeter.often_us` and the pause, over a slow spell
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
_USUAL_CACHE_BYTES = 1 << 20  # of the second level, where the system does not say its size
_SHIFTS = {"K": 10, "M": 20}


def cpu_title() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} threads"


class CpuMeter:
    def __init__(self) -> None:
        self.passes, self.device, self.title = PASSES, CPU, cpu_title()
        self.cache_bytes = _cache_bytes()
        self.settings, self.versions = "", dict[str, str]()

    @functools.cached_property
    def _others(self) -> Tensor:
        return torch.zeros(2 * self.cache_bytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        with torch.no_grad(), torch.autocast(CPU, enabled=False), torch.random.fork_rng([]):
            yield

    def is_quiet(self) -> bool:
        """Whether this thread has a core to itself, for as long as it is tried."""
        watch, end_s = LoadAwareTimer(), time.perf_counter() + _TRIED_S
        while time.perf_counter() < end_s:
            pass
        return watch.away <= _QUIET

    def settle(self) -> None:
        """Nothing: a CPU's clock is not ours to settle."""

    def median_us(self, run: Run, moved_bytes: int = 0) -> float:
        """The median of 1 to 8 runs, each of which finds the core's cache full of other data."""
        del moved_bytes

        # Full of other data, as after a few ops of a step: an op that finds its data where it left
        # them is a fifth cheaper, in an LSTM, than one computed again.
        def timed_us() -> float:
            self._others.add_(1)
            return self.step_us(run)

        return median_of(timed_us, self.passes)

    def often_us(self, *runs: Run) -> list[float]:
        """The median of many `median_us` of each, for numbers that later costs are made of."""
        found: list[list[float]] = []
        for _ in range(_OFTEN):
            found.append([self.median_us(run) for run in runs])  # in turn: a spell meets all
            time.sleep(_APART_S)
        return [statistics.median(times) for times in zip(*found, strict=True)]

    def step_us(self, run: Run) -> float:
        """By the clock, without what others had of the core."""
        watch = LoadAwareTimer()
        _result = run()  # held, so that it is not freed in that time
        return watch.taken_us

    def step_memory(self, run: Run) -> StepMemory:
        return StepMemory(measure_peak(run))

    def library_bytes(self) -> int:
        return 0

    regions = staticmethod(measure_regions)
    rng_state = staticmethod(torch.get_rng_state)


def _cache_bytes() -> int:
    try:
        text = _CACHE_SIZE.read_text(encoding="utf-8").strip()
    except OSError:
        return _USUAL_CACHE_BYTES
    return int(text[:-1]) << _SHIFTS[text[-1]]

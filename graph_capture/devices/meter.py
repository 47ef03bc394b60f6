"""How a device is measured: a `Meter` is all that timing and checking know of it.

Here is that of a CPU, by its clock and the profiler's allocation events.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.memory_events import (
    Moment,
    RegionMemory,
    measure_moments,
    measure_peak,
    measure_regions,
)
from remat.graph_capture.torch_private.core import precision_settings

Run = Callable[[], Any]

_MIN_RUNS, _MAX_RUNS, _ENOUGH_US = 3, 25, 50_000.0  # runs in all passes; no more after that time
_SOON_US = 2_000.0  # ends a pass once two runs agree, as other passes confirm them
PASSES = 3  # of a CPU: of three, two agree though one falls into a slow spell (`op_times.py`)
_AGREE, _ABOUT_US = 0.02, 10.0  # times that differ by less are one figure twice


@dataclass(frozen=True)
class StepMemory:
    peak_bytes: int  # the most live above what was live when it began
    rounding_bytes: int = 0  # of these, what the allocator gave beyond what was asked of it
    slack_bytes: int | None = None  # held by the allocator at the peak; None if it holds none


class Meter(Protocol):
    device: str  # such as ``cpu`` or ``cuda:0``
    title: str  # of the machine, as profiles name it
    passes: int  # over the distinct ops of a step, in each of which all are timed
    clocks: dict[str, str]  # as `settle` found them; empty where nobody says

    @property
    def settings(self) -> str:
        """What else costs depend on. Those of other settings are kept in another file."""
        ...

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what runs the ops, beside torch's."""
        ...

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """While ops run on made data: no gradients, no autocast, the random streams kept."""
        ...

    def settle(self) -> None: ...  # the clocks

    def is_quiet(self) -> bool:
        """Whether what is measured now would be truer than what was measured in a busy time."""
        ...

    def median_us(self, run: Run, moved_bytes: int = 0) -> float:
        """Median time of `run`, which has run before; `moved_bytes` are its inputs and outputs."""
        ...

    def queue_us(self, run: Run) -> float:
        """What the host takes to queue `run` for the device; 0 where it runs it itself."""
        ...

    def often_us(self, *runs: Run) -> list[float]:
        """The time of each, for numbers that later costs are made of."""
        ...

    def regions(self, regions: Iterable[Run]) -> list[RegionMemory]:
        """Memory of each callable, without what the iterable allocates between two."""
        ...

    def moments(self, run: Callable[[Callable[[str], None]], Any]) -> list[Moment]:
        """Memory at each moment that `run` names by the function it is given, and at its end."""
        ...

    def step_us(self, run: Run) -> float: ...

    def of_rounds(self, times: Sequence[float]) -> float:
        """The time of a step that was run so often in a row."""
        ...

    def step_memory(self, run: Run) -> StepMemory: ...

    def library_bytes(self) -> int:
        """What the device's libraries keep allocated once they were used."""
        ...

    def rng_state(self) -> Tensor: ...  # of the device's default generator


def have_agreed(times: Sequence[float]) -> bool:
    """Whether the two least of these say the same: no further run would say less."""
    least = sorted(times)[:2]
    return len(least) == 2 and least[1] <= least[0] + max(_AGREE * least[0], _ABOUT_US)


def least_agreed(times: Sequence[float]) -> float:
    """The least time that another confirms; the median where all differ."""
    rising = sorted(times)  # others only make it slower, unless the clock cut it short
    agreed = (one for one, following in pairwise(rising) if have_agreed((one, following)))
    return next(agreed, statistics.median(rising))


def median_of(timed_us: Callable[[], float], passes: int = 1) -> float:
    """The median of the times of one pass: its share of 3 to 25, fewer the longer they are."""
    times: list[float] = []
    least, most, enough_us = _MIN_RUNS // passes, _MAX_RUNS // passes, _ENOUGH_US / passes
    while len(times) < least or (len(times) < most and sum(times) < enough_us):
        times.append(timed_us())
        if passes > 1 and sum(times) >= _SOON_US and have_agreed(times):
            break
    return statistics.median(times)


# How long something took of this thread's time, and how much of that others had the core.


if sys.platform == "linux":
    import resource

    def _switches() -> tuple[int, int]:
        """How often this thread was switched off by others, and how often it waited."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_nivcsw, used.ru_nvcsw

else:

    def _switches() -> tuple[int, int]:
        """Not known: then no time counts as that of others."""
        return 0, 0


class LoadAwareTimer:
    def __init__(self) -> None:
        self._switches = _switches()
        self._wall_s, self._own_s = time.perf_counter(), time.thread_time()

    def _spans(self) -> tuple[float, float, int, int]:
        """Seconds on the clock and of this thread, and switches by others and of its own accord."""
        wall_s, own_s = time.perf_counter() - self._wall_s, time.thread_time() - self._own_s
        (others, own), (others_before, own_before) = _switches(), self._switches
        return wall_s, min(own_s, wall_s), others - others_before, own - own_before

    @property
    def taken_us(self) -> float:
        """The time since the start, without what others had, where the two can be told apart."""
        wall_s, own_s, by_others, by_itself = self._spans()
        # Switched off without having asked, the thread lost the core to others. A wait of its own
        # accord, for threads that work for it, is time that the work takes.
        return 1e6 * (own_s if by_others and not by_itself else wall_s)

    @property
    def away(self) -> float:
        """The part of the time since the start in which others may have had the core."""
        wall_s, own_s, by_others, _ = self._spans()
        return 1 - own_s / wall_s if by_others and wall_s > 0 else 0.0


# How a CPU is measured. It has no counter of memory, and modes that watch tensors miss workspaces.

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
        precision, self.versions = precision_settings()[3:], dict[str, str]()  # of oneDNN
        self.clocks = dict[str, str]()
        self.settings = "" if set(precision) == {"ieee"} else " ".join(precision)

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

    def queue_us(self, run: Run) -> float:
        del run
        return 0.0

    of_rounds = staticmethod(least_agreed)
    moments = staticmethod(measure_moments)
    regions = staticmethod(measure_regions)
    rng_state = staticmethod(torch.get_rng_state)


def _cache_bytes() -> int:
    try:
        text = _CACHE_SIZE.read_text(encoding="utf-8").strip()
    except OSError:
        return _USUAL_CACHE_BYTES
    return int(text[:-1]) << _SHIFTS[text[-1]]

"""How a device is measured: the times and the memory of ops and of steps.

A `Meter` is all that pricing and checking know of it; `CpuMeter` is here, that of a CUDA device
in `cuda_meter.py`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from remat.graph_capture.devices.device_table import CPU, is_cuda
from remat.graph_capture.devices.memory_events import RegionMemory, measure_peak, measure_regions
from remat.graph_capture.prices.price_cache import device_name

Run = Callable[[], Any]

CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
USUAL_CACHE_BYTES = 1 << 20
_SHIFTS = {"K": 10, "M": 20}
MIN_RUNS, MAX_RUNS = 3, 25
ENOUGH_US = 50_000.0
PASSES = 3
OFTEN, APART_S = 9, 0.1


@dataclass(frozen=True)
class StepMemory:
    """Memory of one step.

    Attributes
    ----------
    peak_bytes : the most that it has live above what was live when it began.
    rounding_bytes : of these, what the allocator gave beyond what was asked of it.
    slack_bytes : at its peak held by the allocator and not given out; None where the device has
        no allocator that holds any.
    """

    peak_bytes: int
    rounding_bytes: int = 0
    slack_bytes: int | None = None


class Meter(Protocol):
    """How one device is measured.

    Attributes
    ----------
    device : ``cpu``, ``cuda:0``. title : the very machine, as profiles name it.
    passes : how often the distinct ops of a step are gone through to time them.
    """

    device: str
    title: str
    passes: int

    @property
    def settings(self) -> str:
        """What else its prices depend on; they are kept apart by it."""
        ...

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what runs the ops, beside torch's."""
        ...

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """While ops run on made data: no gradients, no autocast, the random streams kept."""
        ...

    def settle(self) -> None:
        """Let the clocks settle."""
        ...

    def median_us(self, run: Run, moved_bytes: int = 0) -> float:
        """Median time of `run`, which has run before; `moved_bytes` are its inputs and outputs."""
        ...

    def regions(self, regions: Iterable[Run]) -> list[RegionMemory]:
        """Memory of each callable, apart from what the iterable allocates between two."""
        ...

    def step_us(self, run: Run) -> float:
        """Time of one step."""
        ...

    def step_memory(self, run: Run) -> StepMemory:
        """Memory of one step."""
        ...

    def library_bytes(self) -> int:
        """What the device's libraries keep allocated once they were used."""
        ...

    def rng_state(self) -> Tensor:
        """State of the device's default generator."""
        ...


class CpuMeter:
    """The CPU: its clock, and the profiler's allocation events.

    Other work slows a core for seconds on end, so that each op is timed a few times, seconds apart.
    """

    def __init__(self) -> None:
        self.passes = PASSES
        self.device, self.title = CPU, device_name()
        self.cache_bytes = _cache_bytes()
        self._others = torch.zeros(2 * self.cache_bytes, dtype=torch.uint8)

    @property
    def settings(self) -> str:
        """None that is known."""
        return ""

    @property
    def versions(self) -> dict[str, str]:
        """None beside torch's."""
        return {}

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """No gradients, no autocast, the random stream kept."""
        with torch.no_grad(), torch.autocast(CPU, enabled=False), torch.random.fork_rng([]):
            yield

    def settle(self) -> None:
        """Nothing: a CPU's clock is not ours to settle."""

    def median_us(self, run: Run, moved_bytes: int = 0) -> float:
        """The median of 1 to 8 runs, each of which finds a core's own cache filled with others.

        So it does after a few ops of a step.
        """
        del moved_bytes

        def timed_us() -> float:
            self._others.add_(1)
            return self.step_us(run)

        return median_of(timed_us, self.passes)

    def often_us(self, run: Run) -> float:
        """The median of many `median_us`, for a number that all later prices hang on."""
        found: list[float] = []
        for _ in range(OFTEN):
            found.append(self.median_us(run))
            time.sleep(APART_S)
        return statistics.median(found)

    def regions(self, regions: Iterable[Run]) -> list[RegionMemory]:
        """As `measure_regions`."""
        return measure_regions(regions)

    def step_us(self, run: Run) -> float:
        """By the clock."""
        start = time.perf_counter()
        result = run()
        end = time.perf_counter()
        del result
        return 1e6 * (end - start)

    def step_memory(self, run: Run) -> StepMemory:
        """As `measure_peak`."""
        return StepMemory(measure_peak(run))

    def library_bytes(self) -> int:
        """None that is known."""
        return 0

    def rng_state(self) -> Tensor:
        """As `torch.get_rng_state`."""
        return torch.get_rng_state()


def _cache_bytes() -> int:
    """Size of the second-level cache of a core."""
    try:
        text = CACHE_SIZE.read_text().strip()
    except OSError:
        return USUAL_CACHE_BYTES
    return int(text[:-1]) << _SHIFTS[text[-1]]


def median_of(timed_us: Callable[[], float], passes: int = 1) -> float:
    """The median of the times of one of some passes: 3 to 25 in all, fewer the longer they are."""
    times: list[float] = []
    least, most, enough_us = MIN_RUNS // passes, MAX_RUNS // passes, ENOUGH_US / passes
    while len(times) < least or (len(times) < most and sum(times) < enough_us):
        times.append(timed_us())
    return statistics.median(times)


def meter_of(device: str) -> Meter:
    """How a device of this machine is measured."""
    if is_cuda(device):
        from remat.graph_capture.devices.cuda_meter import CudaMeter

        return CudaMeter(device)
    return CpuMeter()

"""How a device is measured: the times and the memory of ops and of steps.

A `Meter` is all that pricing and checking know of it; `CpuMeter` is here, that of a CUDA device
in `cuda_meter.py`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from remat.graph_capture.devices.memory_events import RegionMemory

Run = Callable[[], Any]

MIN_RUNS, MAX_RUNS = 3, 25
ENOUGH_US = 50_000.0
PASSES = 3


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


def median_of(timed_us: Callable[[], float], passes: int = 1) -> float:
    """The median of the times of one of some passes: 3 to 25 in all, fewer the longer they are."""
    times: list[float] = []
    least, most, enough_us = MIN_RUNS // passes, MAX_RUNS // passes, ENOUGH_US / passes
    while len(times) < least or (len(times) < most and sum(times) < enough_us):
        times.append(timed_us())
    return statistics.median(times)

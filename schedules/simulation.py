"""What the simulator found of a schedule: bytes step by step, time, copies and waits for them."""

from __future__ import annotations

import msgspec

from remat.graph_capture.graph import LinkName


class Stall(msgspec.Struct, frozen=True):
    step: int
    value: str
    us: float


class Copy(msgspec.Struct, frozen=True):
    """One copy over a link: the step that begins it, and when it starts and ends."""

    step: int
    link: LinkName
    value: str
    size_bytes: int
    start_us: float
    end_us: float


class Simulation(msgspec.Struct, frozen=True):
    """What `simulate` found.

    Attributes
    ----------
    peak_bytes : the most bytes live on the device at once, resident ones included.
    peak_step : index of the step at which the peak is first reached.
    time_us : of the step, until its last computation or copy ends. Where nothing is copied, this is
        the sum of the costs of all computations.
    overhead : `time_us` over the time of computing every op once, minus one.
    live_bytes : one number a step: bytes live while it runs.
    held_at_peak : values live at the peak, largest first, outputs of its op included.
    workspace_at_peak_bytes : workspace of the op at the peak.
    clock_us : one number a step: the device's clock after it.
    stalls : waits for copies. busy_us : by engine, time in which it works.
    copies : each copy, with its link, in the order of their steps.
    moved_bytes : by link. host_peak_bytes, nvme_peak_bytes : most bytes live in these tiers.
    below_bytes : by tier below the device, one number a step: bytes there after it. Empty where
        nothing ever is.
    """

    peak_bytes: int
    peak_step: int
    time_us: float
    overhead: float
    live_bytes: tuple[int, ...]
    held_at_peak: tuple[str, ...]
    workspace_at_peak_bytes: int
    clock_us: tuple[float, ...] = ()
    stalls: tuple[Stall, ...] = ()
    copies: tuple[Copy, ...] = ()
    busy_us: dict[str, float] = {}
    moved_bytes: dict[str, int] = {}
    host_peak_bytes: int = 0
    nvme_peak_bytes: int = 0
    below_bytes: dict[str, tuple[int, ...]] = {}

    @property
    def stall_us(self) -> float:
        """Time in which the device waits for copies."""
        return self.time_us - self.busy_us.get("device", self.time_us)

    def __repr__(self) -> str:
        return (
            f"Simulation(peak {self.peak_bytes} bytes at step {self.peak_step}, "
            f"{self.time_us:.0f} us, overhead {100 * self.overhead:.2f} %)"
        )

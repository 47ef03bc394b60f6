"""What a GiB is worth, as a record."""

from __future__ import annotations

import msgspec

from remat.graph_capture.errors import SolverError

GIB = 1 << 30
STEP_SHARE = 20
"""If a GiB is more than one part in so many of the peak, that part is priced instead: on a small
model a GiB would say nothing."""


class GibPrice(msgspec.Struct, frozen=True):
    """What `step_bytes` more would save of a step, and as many less would cost.

    Attributes
    ----------
    budget_bytes, step_bytes : where, and how much more or less.
    time_us : of the step at the budget. more_us, less_us : of the fastest schedules found
        with `step_bytes` more and less; `less_us` is None where none was found that fits.
    """

    budget_bytes: int
    step_bytes: int
    time_us: float
    more_us: float
    less_us: float | None

    @property
    def saved_us(self) -> float:
        """Time that the larger budget saves, in µs a step."""
        return self.time_us - self.more_us

    @property
    def cost_us(self) -> float | None:
        """Time that the smaller budget costs, in µs a step; None where nothing fits."""
        return None if self.less_us is None else self.less_us - self.time_us

    @property
    def saved(self) -> float:
        """`saved_us` as a fraction of the step."""
        return self.saved_us / self.time_us if self.time_us else 0.0

    @property
    def cost(self) -> float | None:
        """`cost_us` as a fraction of the step."""
        if self.cost_us is None:
            return None
        return self.cost_us / self.time_us if self.time_us else 0.0

    def __repr__(self) -> str:
        less = "does not fit" if self.cost is None else f"costs {100 * self.cost:.2f} %"
        return (
            f"Price({self.step_bytes} bytes at {self.budget_bytes}: as many more save "
            f"{100 * self.saved:.2f} % of the step, as many less: {less})"
        )


def checked_step(step_bytes: int, peak_bytes: int) -> int:
    """`step_bytes`, or if that is 0 one GiB, or 5 % of the peak if that is less.

    Raises
    ------
    SolverError : it is negative.
    """
    if step_bytes < 0:
        raise SolverError(
            f"step_bytes must be 0 (a GiB, or 5 % of the peak) or more, not {step_bytes}"
        )
    return step_bytes or max(min(GIB, peak_bytes // STEP_SHARE), 1)

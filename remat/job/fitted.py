"""What `remat fit` found: the largest size that fits, the one after it, and all that were tried."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class SizeTried(msgspec.Struct, frozen=True):
    """A real capture at a size, and the plan that was found there.

    Attributes
    ----------
    fits : within the budget at no more than the overhead asked for. peak_bytes, time_us,
        overhead, lower_bound_us : of the fastest plan within the budget, 0 where there is none.
    unmodified_bytes : peak of the step that keeps everything. least_bytes : where nothing fits,
        the least budget known to do, 0 where none is.
    """

    size: int
    fits: bool
    status: str
    peak_bytes: int
    time_us: float
    overhead: float
    lower_overhead: float
    unmodified_bytes: int
    least_bytes: int
    says: str
    seconds: float


class Fit(msgspec.Struct, frozen=True):
    """The largest size that fits, the one after it that does not, and all that were tried.

    Attributes
    ----------
    vary : the argument of the factory. size : the answer, 0 where no size fits.
    limited_by : why the next size does not: ``memory`` (no plan within the budget is known),
        ``overhead`` (the fastest one is too slow), or ``most`` (it was not to be tried).
    answer, next : both from real captures. tried : all real captures, by size.
    without_plan : the largest size whose unmodified step fits, as the two captures predict.
    measured_peak_bytes : of the answer when run, by the profiler; None where it was not run.
    """

    model: str
    device: str
    vary: str
    size: int
    budget_bytes: int
    max_overhead: float
    limited_by: Literal["memory", "overhead", "most"]
    answer: SizeTried | None
    next: SizeTried | None
    tried: tuple[SizeTried, ...]
    without_plan: int
    measured_peak_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain bytes, microseconds and names, for `--json`."""
        return msgspec.to_builtins(self)

    def __str__(self) -> str:
        from remat.questions.tables import rendered
        from remat.screen_fit import fit_screen

        return rendered(fit_screen(self))

    __repr__ = __str__

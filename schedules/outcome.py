"""What a solve comes to: a status, a schedule with its figures, and a proven bound.

It stands here and not in the solver, so that a plan which is only followed imports no solver.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from remat.schedules.schedule import Schedule
from remat.schedules.simulate import gap_of

_Status = Literal["optimal", "feasible", "infeasible", "time limit"]


class Attention(msgspec.Struct, frozen=True):
    """How many attention outputs backward needs, and how many of them are computed again."""

    outputs: int
    recomputed: int

    def __str__(self) -> str:
        if self.recomputed:
            return f"recomputes {self.recomputed} of {_outputs(self.outputs)}"
        return f"keeps {'all ' if self.outputs > 1 else ''}{_outputs(self.outputs)}"


def _outputs(count: int) -> str:
    return f"{count} attention output" + ("s" if count != 1 else "")


class Holding(msgspec.Struct, frozen=True):
    """One entry of what holds the memory at a peak."""

    name: str
    size_bytes: int
    module: str = ""


class Result(msgspec.Struct, frozen=True):
    """Outcome of one solve.

    Attributes
    ----------
    status : ``optimal`` (proved), ``feasible``, ``infeasible``, or ``time limit`` (the
        search was cut short; `schedule` is the best found, None if none was).
    schedule : a schedule whose simulated peak is within the budget, or None.
    peak_bytes, time_us, overhead : of `schedule`, from `simulate`; 0 where there is none.
    lower_bound_us : no schedule of this budget, in the captured order of first
        computations, takes less time; with the option `order` free, none in any order. 0 where
        nothing is proved.
    solver, wall_s : who solved it, and how long that took.
    least_feasible_bytes : where infeasible, the least budget known to be feasible.
    least_schedule : where infeasible, one whose peak is that budget, if it is at hand.
    held_at_peak : where infeasible, what holds the memory at that schedule's peak.
    least_bound_bytes : where infeasible, no schedule has a lower peak; 0 where not sought.
    floor : None unless the budget is below it. What any schedule in captured order needs that
        never computes an output of the step again: the op that sets it, and the bytes.
    otherwise : where infeasible, what else would lower the peak, in words; empty where not sought.
    attention : where something runs again, how much of attention does; None without any.
    message : what to say to the user beyond the figures.
    """

    status: _Status
    solver: str
    budget_bytes: int
    schedule: Schedule | None = None
    peak_bytes: int = 0
    time_us: float = 0.0
    overhead: float = 0.0
    lower_bound_us: float = 0.0
    wall_s: float = 0.0
    least_feasible_bytes: int = 0
    least_schedule: Schedule | None = None
    held_at_peak: tuple[Holding, ...] = ()
    least_bound_bytes: int = 0
    floor: Holding | None = None
    otherwise: str = ""
    attention: Attention | None = None
    message: str = ""

    @property
    def gap(self) -> float | None:
        """How far the schedule may be from the best: time over bound, minus one.

        None where there is no schedule or no bound.
        """
        return gap_of(self.time_us, self.lower_bound_us) if self.schedule is not None else None

    def _repr_html_(self) -> str:
        from remat.formats import bytes_text, figures_html, percent_text, proved_text, time_text

        figures = [("status", f"{self.status}, by {self.solver} in {self.wall_s:.1f} s")]
        figures.append(("budget", bytes_text(self.budget_bytes)))
        if self.schedule is not None:
            figures += [
                ("peak", bytes_text(self.peak_bytes)),
                ("step", time_text(self.time_us)),
                ("overhead", percent_text(self.overhead)),
                ("gap", proved_text(self.gap)),
                ("attention", str(self.attention or "")),
            ]
        elif self.least_feasible_bytes:
            figures.append(("least budget known", bytes_text(self.least_feasible_bytes)))
        return figures_html(type(self).__name__, [*figures, ("note", self.message)])

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.schedule is None:
            return f"{name}({self.status}, {self.solver}, budget {self.budget_bytes} bytes)"
        gap = "no bound" if self.gap is None else f"gap {100 * self.gap:.2f} %"
        return (
            f"{name}({self.status}, {self.solver}: peak {self.peak_bytes} of "
            f"{self.budget_bytes} bytes, overhead {100 * self.overhead:.2f} %, "
            f"{gap}, {self.wall_s:.1f} s" + (f", {self.attention})" if self.attention else ")")
        )

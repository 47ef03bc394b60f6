"""What a solve comes to. It is not in the solver: a plan that is only followed imports none."""

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
    name: str
    size_bytes: int
    module: str = ""


class Result(msgspec.Struct, frozen=True):
    """Outcome of one solve; figures are those of `simulate`, 0 where there is no schedule."""

    status: _Status  # with ``time limit``, `schedule` is the best found, None if none was
    solver: str
    budget_bytes: int
    schedule: Schedule | None = None  # within the budget
    peak_bytes: int = 0
    time_us: float = 0.0
    overhead: float = 0.0
    # Of all schedules in captured order, or in any with the option `order` free; 0 is unproved.
    lower_bound_us: float = 0.0
    wall_s: float = 0.0
    least_feasible_bytes: int = 0  # where infeasible: the least budget known to do
    least_schedule: Schedule | None = None  # where infeasible: of that budget, if at hand
    held_at_peak: tuple[Holding, ...] = ()  # of that schedule
    least_bound_bytes: int = 0  # no schedule has a lower peak; 0 where not sought
    # None unless the budget is below it: the op that sets what any schedule in captured order needs
    # that never computes an output of the step again, and the bytes.
    floor: Holding | None = None
    otherwise: str = ""  # what else would lower the peak, in words; empty where not sought
    attention: Attention | None = None  # where something runs again, how much of attention does
    message: str = ""  # what to say to the user beyond the figures

    @property
    def gap(self) -> float | None:
        """Time over bound, minus one; None where there is no schedule or no bound."""
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

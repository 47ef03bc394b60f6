"""Fronts: the step's time against the budget, and what a GiB more or less is worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Self

import msgspec

from remat.formats import GIB, NO_BOUND, bytes_text, percent_text, proved_text, table_html
from remat.graph_capture.errors import RematError, SolverError
from remat.graph_capture.files import Record
from remat.graph_capture.graph import are_figures
from remat.schedules.outcome import Result

_STEP_SHARE = 20  # at most such a part of the peak is priced: a GiB says nothing of a small model


class GibPrice(msgspec.Struct, frozen=True):
    """What `step_bytes` more would save and less would cost; `less_us` is None if nothing fits."""

    budget_bytes: int
    step_bytes: int
    time_us: float
    more_us: float
    less_us: float | None

    @property
    def saved_us(self) -> float:
        """In µs a step."""
        return self.time_us - self.more_us

    @property
    def cost_us(self) -> float | None:
        """In µs a step; None where nothing fits."""
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
    """0 stands for one GiB, or 5 % of the peak if that is less."""
    if step_bytes < 0:
        raise SolverError(
            f"step_bytes must be 0 (a GiB, or 5 % of the peak) or more, not {step_bytes}"
        )
    return step_bytes or max(min(GIB, peak_bytes // _STEP_SHARE), 1)


class Point(NamedTuple):
    budget_bytes: int
    result: Result


class Front(Record, frozen=True):
    """Outcomes of one solver at rising budgets; time never rises with the budget.

    No schedule's peak is below `least_needed_bytes`, what some op, or the end, needs with what is
    resident: not the floor of a `Result`, though files say ``floor_bytes``. `base_us` is of every
    op once, `unmodified_bytes` the peak without a plan.
    """

    noun: ClassVar[str] = "front of a sweep"
    again: ClassVar[str] = "make it again with remat sweep MODEL -o FILE"
    error: ClassVar[type[RematError]] = SolverError
    name: str
    graph_hash: str
    solver: str
    base_us: float
    least_needed_bytes: int = msgspec.field(name="floor_bytes")
    unmodified_bytes: int
    points: tuple[Point, ...]

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def best_within(self, budget_bytes: int) -> Result | None:
        """The fastest outcome of the front whose peak is within `budget_bytes`."""
        fit = [r for _, r in self.points if r.schedule is not None and r.peak_bytes <= budget_bytes]
        return min(fit, key=lambda result: (result.time_us, result.peak_bytes), default=None)

    def price_of_gib(self, budget_bytes: int, step_bytes: int = 0) -> GibPrice:
        """From the front alone; 0 is one GiB, or 5 % of the peak. SolverError: nothing fits."""
        if (here := self.best_within(budget_bytes)) is None:
            peaks = [p.result.peak_bytes for p in self.points if p.result.schedule is not None]
            least = f"the least peak in it is {min(peaks)} bytes" if peaks else "it has no schedule"
            raise SolverError(f"no schedule of this front fits {budget_bytes} bytes: {least}")
        step_bytes = checked_step(step_bytes, here.peak_bytes)
        more = self.best_within(budget_bytes + step_bytes) or here
        less = self.best_within(budget_bytes - step_bytes)
        less_us = less.time_us if less else None
        return GibPrice(budget_bytes, step_bytes, here.time_us, more.time_us, less_us)

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "the file") -> Self:
        """As of any record; `SolverError` too for a figure that cannot be."""
        front = super().from_json(data, name)
        front.check_figures(name)
        return front

    def check_figures(self, name: str = "the front") -> None:
        """Raise `SolverError` where a figure cannot be, as in a file that was edited."""
        sizes = self.base_us, self.least_needed_bytes, self.unmodified_bytes
        if not are_figures(*sizes):
            raise SolverError(f"{name} has an impossible figure, of the step without a plan")
        for budget_bytes, result in self.points:
            figures = (
                budget_bytes, result.peak_bytes, result.time_us, result.lower_bound_us,
                result.wall_s, result.least_feasible_bytes, result.least_bound_bytes,
            )  # fmt: skip
            if not are_figures(*figures):
                raise SolverError(f"{name} has an impossible figure, at one of its budgets")

    def _repr_html_(self) -> str:
        headers = ("budget", "peak", "overhead", "gap", "seconds", "status")
        rows = [_cells(point) for point in self.points]
        return table_html(f"Front: {self.name}, by {self.solver}", headers, rows)

    def __repr__(self) -> str:
        head = (
            f"Front({self.name}, by {self.solver}: unmodified peak {self.unmodified_bytes} bytes, "
            f"step {self.base_us:.0f} us)"
        )
        columns = f"{'budget':>16} {'peak':>16} {'overhead':>9} {'gap':>8} {'seconds':>8}  status"
        return "\n".join([head, columns, *(_line(point) for point in self.points)])


def _line(point: Point) -> str:
    result = point.result
    if result.schedule is None:
        figures = f"{'-':>16} {'-':>9} {'-':>8}"
    else:
        gap = NO_BOUND if result.gap is None else f"{100 * result.gap:.2f} %"
        figures = f"{result.peak_bytes:>16} {100 * result.overhead:>7.2f} % {gap:>8}"
    return f"{point.budget_bytes:>16} {figures} {result.wall_s:>8.1f}  {result.status}"


def _cells(point: Point) -> tuple[str, ...]:
    result = point.result
    figures = ("-", "-", "-")
    if result.schedule is not None:
        peak = bytes_text(result.peak_bytes)
        figures = (peak, percent_text(result.overhead), proved_text(result.gap))
    return bytes_text(point.budget_bytes), *figures, f"{result.wall_s:.1f}", result.status

"""Time against peak: what each solver reaches, the bound, and your budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from remat.schedules.plots.literal import literal
from remat.schedules.plots.units import scale_of
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import overhead_of
from remat.schedules.views.palette import ROLES, cycled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP*X"


class Outcome(Protocol):
    """What a picture needs of `remat.solver.result.Result`."""

    @property
    def schedule(self) -> Schedule | None:
        """None if nothing was found."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Peak of the schedule."""
        ...

    @property
    def time_us(self) -> float:
        """Time of the schedule."""
        ...

    @property
    def lower_bound_us(self) -> float:
        """No schedule takes less at this budget."""
        ...


class DrawnFront(Protocol):
    """What a picture needs of `remat.solver.budgets.front.Front`."""

    @property
    def name(self) -> str:
        """The name of the model."""
        ...

    @property
    def base_us(self) -> float:
        """Time of the step that computes every op once."""
        ...

    @property
    def unmodified_bytes(self) -> int:
        """Peak of the step that keeps everything."""
        ...

    @property
    def points(self) -> Iterable[tuple[int, Outcome]]:
        """Budgets in bytes, and the outcome at each."""
        ...


def draw_front(
    ax: Axes,
    fronts: DrawnFront | Mapping[str, DrawnFront],
    *,
    budget_bytes: int = 0,
    plan: Outcome | None = None,
) -> Axes:
    """Draw overhead against peak, one line a solver, and the best bound at each budget.

    Parameters
    ----------
    fronts : what `remat.sweep` returns; or several of these by the solver's name.
    budget_bytes : where to draw your budget, if it is not 0. plan : a result to mark.
    """
    curves = dict(fronts) if isinstance(fronts, Mapping) else {_solver(fronts): fronts}
    colours = cycled(list(curves))
    largest = max((curve.unmodified_bytes for curve in curves.values()), default=0)
    scale, unit = scale_of(largest)
    for i, (name, curve) in enumerate(curves.items()):
        found = [(o.peak_bytes, _percent(o.time_us, curve)) for _, o in curve.points if o.schedule]
        found.sort()
        ax.plot(
            [x / scale for x, _ in found], [y for _, y in found],
            marker=MARKERS[i % len(MARKERS)], ms=4, lw=1.2, color=colours[name],
            label=literal(name),
        )  # fmt: skip
    budgets, bounds = _bounds(curves.values())
    ax.plot([b / scale for b in budgets], bounds, color=ROLES["bound"], ls=":", label="bound")
    if budget_bytes:
        ax.axvline(budget_bytes / scale, color=ROLES["budget"], ls="--", lw=1.2, label="budget")
    base = next(iter(curves.values()), None)
    if plan is not None and plan.schedule and base:
        ax.plot(
            [plan.peak_bytes / scale], [_percent(plan.time_us, base)],
            marker="*", ms=13, ls="", color=ROLES["plan"], label="this plan", zorder=5,
        )  # fmt: skip
    ax.set(xlabel=f"peak ({unit})", ylabel="overhead (%)", title=literal(base.name) if base else "")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small", frameon=False)
    return ax


def _solver(curve: DrawnFront) -> str:
    return str(getattr(curve, "solver", "plans"))


def _percent(time_us: float, curve: DrawnFront) -> float:
    return 100 * overhead_of(time_us, curve.base_us)


def _bounds(curves: Iterable[DrawnFront]) -> tuple[list[int], list[float]]:
    """The highest bound known at each budget that was solved."""
    best: dict[int, float] = {}
    for curve in curves:
        for budget_bytes, outcome in curve.points:
            if outcome.lower_bound_us:
                bound = _percent(outcome.lower_bound_us, curve)
                best[budget_bytes] = max(best.get(budget_bytes, 0.0), bound)
    budgets = sorted(best)
    return budgets, [best[budget] for budget in budgets]

"""Curves: time against peak, how a solve went, and predicted against measured costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from remat.graph_capture.errors import GraphError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import overhead_of
from remat.schedules.views.palette import ROLES, cycled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def literal(name: str) -> str:
    # matplotlib reads text between two dollars as a formula.
    return name.replace("$", r"\$")


def scale_of(largest_bytes: float) -> tuple[float, str]:
    """Bytes of the one unit of a picture, and its name: GiB, MiB or KiB."""
    for power, name in ((30, "GiB"), (20, "MiB")):
        if largest_bytes >= 2**power:
            return 2.0**power, name
    return 2.0**10, "KiB"


_MARKERS = "osD^vP*X"


class _Outcome(Protocol):
    """What a picture needs of `remat.solver.result.Result`, which this package does not import."""

    @property
    def schedule(self) -> Schedule | None: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def time_us(self) -> float: ...

    @property
    def lower_bound_us(self) -> float:
        """No schedule takes less at this budget."""
        ...


class _DrawnFront(Protocol):
    """What a picture needs of `remat.solver.budgets.front.Front`."""

    @property
    def name(self) -> str: ...

    @property
    def base_us(self) -> float: ...

    @property
    def unmodified_bytes(self) -> int: ...

    @property
    def points(self) -> Iterable[tuple[int, _Outcome]]: ...


def draw_front(
    ax: Axes,
    fronts: _DrawnFront | Mapping[str, _DrawnFront],
    *,
    budget_bytes: int = 0,
    plan: _Outcome | None = None,
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
        # Sort by peak: a larger budget need not give a larger one.
        found = [(o.peak_bytes, _percent(o.time_us, curve)) for _, o in curve.points if o.schedule]
        found.sort()
        ax.plot(
            [x / scale for x, _ in found], [y for _, y in found],
            marker=_MARKERS[i % len(_MARKERS)], ms=4, lw=1.2, color=colours[name],
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


def _solver(curve: _DrawnFront) -> str:
    return str(getattr(curve, "solver", "plans"))


def _percent(time_us: float, curve: _DrawnFront) -> float:
    return 100 * overhead_of(time_us, curve.base_us)


def _bounds(curves: Iterable[_DrawnFront]) -> tuple[list[int], list[float]]:
    best: dict[int, float] = {}
    for curve in curves:
        for budget_bytes, outcome in curve.points:
            # A bound of 0 means none.
            if outcome.lower_bound_us:
                bound = _percent(outcome.lower_bound_us, curve)
                best[budget_bytes] = max(best.get(budget_bytes, 0.0), bound)
    budgets = sorted(best)
    return budgets, [best[budget] for budget in budgets]


class _Moment(Protocol):
    """What a picture needs of `remat.solver.Progress`."""

    @property
    def seconds(self) -> float: ...

    @property
    def best_overhead(self) -> float | None: ...

    @property
    def bound_overhead(self) -> float: ...


def draw_convergence(
    ax: Axes, told: Sequence[_Moment] | Mapping[str, Sequence[_Moment]], *, title: str = ""
) -> Axes:
    """Draw best overhead and bound against seconds.

    Parameters
    ----------
    told : what a solver reported, in order: ``told = []``, then
        ``remat.solver.solve_within(..., progress=told.append)``. Or several such lists by name.
    """
    runs = dict(told) if isinstance(told, Mapping) else {"best schedule": told}
    colours = cycled(list(runs)) if len(runs) > 1 else dict.fromkeys(runs, ROLES["plan"])
    for name, moments in runs.items():
        best = [(m.seconds, 100 * m.best_overhead) for m in moments if m.best_overhead is not None]
        ax.plot(
            [x for x, _ in best], [y for _, y in best],
            drawstyle="steps-post", color=colours[name], label=name,
        )  # fmt: skip
        bound = colours[name] if len(runs) > 1 else ROLES["bound"]
        title_of_bound = f"bound of {name}" if len(runs) > 1 else "bound"
        ax.plot(
            [m.seconds for m in moments], [100 * max(m.bound_overhead, 0.0) for m in moments],
            drawstyle="steps-post", ls=":", color=bound, label=title_of_bound,
        )  # fmt: skip
    ax.set(xlabel="seconds", ylabel="overhead (%)", title=title)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small", frameon=False)
    return ax


def draw_predicted_measured(ax: Axes, predicted: TrainingGraph, measured: TrainingGraph) -> Axes:
    """Draw one point an op, on logarithmic axes. On the diagonal the two times agree.

    Parameters
    ----------
    predicted, measured : the same step, costed twice: modelled for a device and measured on it,
        or measured on two days. An op that takes no time in one of them is left out.

    Raises
    ------
    GraphError : they are not the same step.
    """
    pairs = _paired_costs_us(predicted, measured)
    for phase in ("forward", "backward"):
        chosen = [(x, y) for x, y, p in pairs if p == phase]
        ax.scatter(
            [x for x, _ in chosen], [y for _, y in chosen],
            s=12, alpha=0.6, color=ROLES[phase], label=phase, linewidths=0,
        )  # fmt: skip
    ends = [value for x, y, _ in pairs for value in (x, y)]
    if ends:
        span = [min(ends), max(ends)]
        ax.plot(span, span, color=ROLES["unmodified"], lw=1, label="equal")
        ax.set(xscale="log", yscale="log")
    ax.set(xlabel="predicted (µs)", ylabel="measured (µs)", title=literal(predicted.name))
    ax.legend(fontsize="small", frameon=False)
    return ax


def _paired_costs_us(
    predicted: TrainingGraph, measured: TrainingGraph
) -> list[tuple[float, float, str]]:
    if predicted.hash != measured.hash:
        raise GraphError(
            f"the two graphs are of different steps ({predicted.name}, hash {predicted.hash[:12]}, "
            f"and {measured.name}, hash {measured.hash[:12]}): capture the same model and batch"
        )
    # Logarithmic axes cannot show 0.
    ops = zip(predicted.ops, measured.ops, strict=True)
    return [(p.cost_us, m.cost_us, p.phase) for p, m in ops if p.cost_us > 0 and m.cost_us > 0]

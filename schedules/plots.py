"""Pictures with matplotlib, which is an extra: each function draws on an ``ax`` of the user's."""

# matplotlib leaves its keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from remat.graph_capture.graph import Floats, Ints, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.layout import Layout, buffers_of, check_layout, kinds_of_buffers
from remat.schedules.outcome import Result
from remat.schedules.palette import DARK_GREY, GREY, KINDS, ROLES, cycled
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import overhead_of, simulate
from remat.schedules.timeline import (
    OTHERS,
    RESIDENT,
    WORKSPACE,
    BandsBy,
    Span,
    live_bands,
    ribbon,
    timeline,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def literal(name: str) -> str:
    return name.replace("$", r"\$")  # matplotlib reads text between two dollars as a formula


def _scale_of(largest_bytes: float) -> tuple[float, str]:
    """Bytes of the one unit of a picture, and its name: GiB, MiB or KiB."""
    for power, name in ((30, "GiB"), (20, "MiB")):
        if largest_bytes >= 2**power:
            return 2.0**power, name
    return 2.0**10, "KiB"


_MARKERS = "osD^vP*X"


class _DrawnFront(Protocol):
    """What a picture needs of `remat.solver.budgets.front.Front`."""

    @property
    def name(self) -> str: ...

    @property
    def base_us(self) -> float: ...

    @property
    def unmodified_bytes(self) -> int: ...

    @property
    def points(self) -> Iterable[tuple[int, Result]]: ...


def draw_front(
    ax: Axes, fronts: _DrawnFront | Mapping[str, _DrawnFront], *, budget_bytes: int = 0,
    plan: Result | None = None,
) -> Axes:  # fmt: skip
    """Draw overhead against peak, one line a solver of `remat.sweep`, and the best bounds."""
    if isinstance(fronts, Mapping):
        curves = dict(fronts)
    else:
        curves = {str(getattr(fronts, "solver", "plans")): fronts}
    colours = cycled(list(curves))
    scale, unit = _scale_of(max((curve.unmodified_bytes for curve in curves.values()), default=0))
    for i, (name, curve) in enumerate(curves.items()):
        # A larger budget need not give a larger peak.
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


def _percent(time_us: float, curve: _DrawnFront) -> float:
    return 100 * overhead_of(time_us, curve.base_us)


def _bounds(curves: Iterable[_DrawnFront]) -> tuple[list[int], list[float]]:
    best: dict[int, float] = {}
    for curve in curves:
        for budget_bytes, outcome in curve.points:
            if outcome.lower_bound_us:  # a bound of 0 means none
                bound = _percent(outcome.lower_bound_us, curve)
                best[budget_bytes] = max(best.get(budget_bytes, 0.0), bound)
    budgets = sorted(best)
    return budgets, [best[budget] for budget in budgets]


# Live bytes through the step, places in an arena, what runs when, and what holds the peak.

_ALPHA = 0.75


def draw_live_bytes(
    ax: Axes, graph: TrainingGraph, schedule: Schedule, *, by: BandsBy = "kind",
    unmodified: tuple[TrainingGraph, Schedule] | None = None,
    measured: tuple[Floats, Ints] | None = None, budget_bytes: int | None = None,
) -> Axes:  # fmt: skip
    """Draw what is live while each op runs.

    `unmodified`: the step as eager runs it, and its schedule. `measured`: moments of a real step in
    any unit and the bytes live then, [n] each. `budget_bytes`: the schedule's if None, none if 0.
    """
    line = timeline(graph, schedule)
    bands = live_bands(line, by)
    names = [name for name in bands if bands[name].any()]
    colours = band_colours(names, by)
    peaks = [line.simulation.peak_bytes, budget_bytes or schedule.budget_bytes]
    baseline = timeline(*unmodified) if unmodified else None
    scale, unit = _scale_of(max([*peaks, baseline.simulation.peak_bytes if baseline else 0]))
    ax.stackplot(  # one edge more than runs: the last entry is repeated
        line.edges, [np.append(bands[name], bands[name][-1:]) / scale for name in names],
        labels=[literal(name) for name in names], colors=[colours[name] for name in names],
        alpha=_ALPHA, step="post", linewidth=0,
    )  # fmt: skip
    if baseline:
        curve = baseline.live_bytes / scale
        ax.stairs(
            curve, baseline.edges,
            color=ROLES["unmodified"], label="unmodified", lw=1.2, baseline=None,
        )  # fmt: skip
    if measured is not None and len(measured[0]):
        ax.plot(
            line.stretched(measured[0]), measured[1] / scale,
            color=ROLES["measured"], label="measured", lw=1, drawstyle="steps-post",
        )  # fmt: skip
    if limit := schedule.budget_bytes if budget_bytes is None else budget_bytes:
        ax.axhline(limit / scale, color=ROLES["budget"], ls="--", lw=1.2, label="budget")
    ax.set(xlabel=line.axis_title, ylabel=f"live bytes ({unit})", title=literal(graph.name))
    ax.set_xlim(0, max(line.edges[-1], baseline.edges[-1] if baseline else 0))
    ax.set_ylim(0)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return ax


def band_colours(names: list[str], by: BandsBy) -> dict[str, str]:
    if by == "kind":
        return {name: KINDS.get(name, GREY) for name in names}
    # Modules get other colours than these three bands.
    fixed = {RESIDENT: GREY, OTHERS: DARK_GREY, WORKSPACE: KINDS[WORKSPACE]}
    modules = [name for name in names if name not in fixed]
    given = {name: colour for name, colour in fixed.items() if name in names}
    return cycled(modules, without=(KINDS[WORKSPACE],)) | given


_EDGE = 0.15  # width in points of the line around a rectangle, so that neighbours can be told apart


def draw_layout(ax: Axes, graph: TrainingGraph, schedule: Schedule, layout: Layout) -> Axes:
    """Draw where each buffer lies and when it is live; a line marks the most live bytes."""
    from matplotlib.collections import PolyCollection

    buffers = buffers_of(graph, schedule)
    check_layout(buffers, layout)
    scale, unit = _scale_of(layout.arena_bytes)
    kinds = np.array(kinds_of_buffers(graph_of_schedule(graph, schedule), buffers))
    low = np.array(layout.offsets_bytes, np.float64) / scale
    high = low + buffers.size_bytes / scale
    x = np.stack([buffers.start, buffers.start, buffers.end, buffers.end], axis=1)
    corners = np.stack([x, np.stack([low, high, high, low], axis=1)], axis=2)
    for kind, colour in KINDS.items():
        if boxes := list(corners[kinds == kind]):
            drawn = PolyCollection(boxes, facecolors=colour, edgecolors="white", linewidths=_EDGE)
            drawn.set_label(kind)
            ax.add_collection(drawn)
    load, colour = layout.load_bytes / scale, ROLES["bound"]
    ax.axhline(load, color=colour, lw=0.8, ls="--", label="most live bytes")
    ax.set(xlabel="runs of ops", ylabel=f"address in the arena, {unit}")
    ax.set(xlim=(0, buffers.n_times), ylim=(0, 1.02 * layout.arena_bytes / scale))
    ax.set_title(literal(graph.name))
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return ax


_MOST_LABELS = 24
_FAINT, _STRONG = 0.25, 0.55
_NARROWEST = 1.0  # points, of the line around what runs again: a single run stays visible


def draw_ribbon(ax: Axes, graph: TrainingGraph, schedule: Schedule) -> Axes:
    """Draw Checkmate's R and S, folded by layer, over the runs of ops.

    Bars are runs. A row is shaded while a forward value of its layer is live, and darker while
    these are at least half of the most bytes that the layer ever holds.
    """
    line = timeline(graph, schedule)
    picture = ribbon(line)
    _draw(ax, picture.holds, ROLES["kept"], _FAINT, 0.9, "")
    _draw(ax, picture.holds_most, ROLES["kept"], _STRONG, 0.9, "kept")
    for name in ("forward", "backward", "recompute"):
        _draw(ax, getattr(picture, name), ROLES[name], 1.0, 0.6, name)
    every = -(-len(picture.titles) // _MOST_LABELS)
    titles = [literal(title) for title in picture.titles]
    ax.set_yticks(range(0, len(titles), every), titles[::every], fontsize="small")
    # Reversed, so that the first layer is on top.
    ax.set(xlabel="runs of ops", xlim=(0, len(line)), ylim=(len(titles) - 0.5, -0.5))
    ax.axvline(line.forward_runs, color=ROLES["unmodified"], lw=0.8, ls=":")
    ax.set_title(literal(graph.name))
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return ax


def _draw(
    ax: Axes, spans: tuple[Span, ...], colour: str, alpha: float, height: float, label: str
) -> None:
    if not spans:
        return
    ax.barh(
        [span.row for span in spans],
        [span.end - span.begin for span in spans],
        left=[span.begin for span in spans],
        # matplotlib leaves labels that begin with an underscore out of the legend.
        height=height, facecolor=colour, edgecolor=colour, alpha=alpha, label=label or "_none",
        linewidth=_NARROWEST if label == "recompute" else 0,
    )  # fmt: skip


def draw_peak_values(ax: Axes, graph: TrainingGraph, schedule: Schedule, *, top: int = 15) -> Axes:
    """Draw the `top` largest values live at the peak, coloured by kind."""
    graph = graph_of_schedule(graph, schedule)
    simulation = simulate(graph, schedule)
    values = [graph.value_by_name[name] for name in simulation.held_at_peak[:top]]
    module = {op.name: op.module for op in graph.ops}
    scale, unit = _scale_of(max((value.size_bytes for value in values), default=0))
    places = [module.get(value.producer, "") for value in values]
    names = [literal(f"{v.name}  {p}".strip()) for v, p in zip(values, places, strict=True)]
    ax.barh(
        range(len(values)),
        [value.size_bytes / scale for value in values],
        color=[KINDS.get(value.kind, GREY) for value in values],
    )
    for kind in dict.fromkeys(value.kind for value in values):
        # For the legend: the call above can have only one label.
        ax.bar([0], [0], color=KINDS.get(kind, GREY), label=kind)
    ax.set_yticks(range(len(values)), names, fontsize="small")
    ax.invert_yaxis()
    rest = len(simulation.held_at_peak) - len(values)
    more = f", {rest} smaller left out" if rest else ""
    ax.set(xlabel=f"size ({unit})", title=f"{literal(graph.name)}: values at the peak{more}")
    ax.set_xlim(left=0)
    if values:
        ax.legend(fontsize="small", frameon=False)
    return ax

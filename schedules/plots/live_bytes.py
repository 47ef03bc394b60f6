"""Live bytes through the step: the plan in bands, and curves to compare it with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plots.literal import literal
from remat.schedules.plots.units import scale_of
from remat.schedules.schedule import Schedule
from remat.schedules.views.live_bands import OTHERS, RESIDENT, WORKSPACE, By, live_bands
from remat.schedules.views.palette import DARK_GREY, GREY, KINDS, ROLES, cycled
from remat.schedules.views.timeline import Floats, Ints, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALPHA = 0.75


def draw_live_bytes(
    ax: Axes,
    graph: TrainingGraph,
    schedule: Schedule,
    *,
    by: By = "kind",
    unmodified: tuple[TrainingGraph, Schedule] | None = None,
    measured: tuple[Floats, Ints] | None = None,
    budget_bytes: int | None = None,
) -> Axes:
    """Draw what is live while each op runs.

    Parameters
    ----------
    by : bands by kind of value or by module.
    unmodified : the step to compare with: its graph, as eager runs it, and its schedule.
    measured : moments of a real step from 0 to its end in any unit, [n], and the bytes live then,
        resident ones included, [n]. It is stretched to the length of the predicted step.
    budget_bytes : where to draw the budget; the schedule's if None, none if 0.

    Raises
    ------
    ScheduleError : a schedule was not made for its graph, or is invalid.
    """
    line = timeline(graph, schedule)
    bands = live_bands(line, by)
    names = [name for name in bands if bands[name].any()]
    colours = band_colours(names, by)
    peaks = [line.simulation.peak_bytes, budget_bytes or schedule.budget_bytes]
    baseline = timeline(*unmodified) if unmodified else None
    scale, unit = scale_of(max([*peaks, baseline.simulation.peak_bytes if baseline else 0]))
    ax.stackplot(
        line.edges,
        [np.append(bands[name], bands[name][-1:]) / scale for name in names],
        labels=[literal(name) for name in names],
        colors=[colours[name] for name in names],
        alpha=ALPHA,
        step="post",
        linewidth=0,
    )
    if baseline:
        curve = baseline.live_bytes / scale
        ax.stairs(
            curve, baseline.edges,
            color=ROLES["unmodified"], label="unmodified", lw=1.2, baseline=None,
        )  # fmt: skip
    if measured is not None and len(measured[0]):
        moments = measured[0] * (line.edges[-1] / measured[0][-1])
        ax.plot(
            moments, measured[1] / scale, color=ROLES["measured"], label="measured", lw=1,
            drawstyle="steps-post",
        )  # fmt: skip
    limit = schedule.budget_bytes if budget_bytes is None else budget_bytes
    if limit:
        ax.axhline(limit / scale, color=ROLES["budget"], ls="--", lw=1.2, label="budget")
    ax.set(xlabel=line.axis_title, ylabel=f"live bytes ({unit})", title=literal(graph.name))
    ax.set_xlim(0, max(line.edges[-1], baseline.edges[-1] if baseline else 0))
    ax.set_ylim(0)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return ax


def band_colours(names: list[str], by: By) -> dict[str, str]:
    """The colour of each band."""
    if by == "kind":
        return {name: KINDS.get(name, GREY) for name in names}
    fixed = {RESIDENT: GREY, OTHERS: DARK_GREY, WORKSPACE: KINDS[WORKSPACE]}
    modules = [name for name in names if name not in fixed]
    given = {name: colour for name, colour in fixed.items() if name in names}
    return cycled(modules, without=(KINDS[WORKSPACE],)) | given

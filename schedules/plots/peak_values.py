"""The largest values at the peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.as_planned import as_planned
from remat.schedules.plots.literal import literal
from remat.schedules.plots.units import scale_of
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.views.palette import GREY, KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_peak_values(ax: Axes, graph: TrainingGraph, schedule: Schedule, *, top: int = 15) -> Axes:
    """Draw the `top` largest values live at the peak, with their modules, coloured by kind.

    Raises
    ------
    ScheduleError : the schedule was not made for the graph, or is invalid.
    """
    graph = as_planned(graph, schedule)
    simulation = simulate(graph, schedule)
    values = [graph.value_by_name[name] for name in simulation.held_at_peak[:top]]
    module = {op.name: op.module for op in graph.ops}
    scale, unit = scale_of(max((value.size_bytes for value in values), default=0))
    places = [module.get(value.producer, "") for value in values]
    names = [literal(f"{v.name}  {p}".strip()) for v, p in zip(values, places, strict=True)]
    ax.barh(
        range(len(values)),
        [value.size_bytes / scale for value in values],
        color=[KINDS.get(value.kind, GREY) for value in values],
    )
    for kind in dict.fromkeys(value.kind for value in values):
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

"""The layout of a step: addresses against time, a rectangle for each buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.as_planned import as_planned
from remat.schedules.buffers import Buffers, buffers_of
from remat.schedules.layout import Layout, check_layout
from remat.schedules.plots.literal import literal
from remat.schedules.plots.units import scale_of
from remat.schedules.schedule import Schedule
from remat.schedules.views.addresses import kinds_of_buffers
from remat.schedules.views.palette import KINDS, ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EDGE = 0.15
"""Width in points of the line around a rectangle, so that neighbours can be told apart."""


def draw_layout(ax: Axes, graph: TrainingGraph, schedule: Schedule, layout: Layout) -> Axes:
    """Draw where each buffer lies and when it is live, in the colours of what bytes are for.

    White below the arena's top is room that nothing takes at that time. A line marks the most live
    bytes, below which no arena can be.

    Raises
    ------
    ScheduleError : the schedule was not made for the graph, or is invalid. LayoutError : the layout
        is not one of its buffers, or is invalid.
    """
    from matplotlib.collections import PolyCollection

    buffers = buffers_of(graph, schedule)
    check_layout(buffers, layout)
    scale, unit = scale_of(layout.arena_bytes)
    kinds = np.array(kinds_of_buffers(as_planned(graph, schedule), buffers))
    for kind, colour in KINDS.items():
        corners = _corners(buffers, layout, scale)[kinds == kind]
        if len(corners):
            drawn = PolyCollection(
                list(corners), facecolors=colour, edgecolors="white", linewidths=EDGE
            )
            drawn.set_label(kind)
            ax.add_collection(drawn)
    ax.axhline(
        layout.load_bytes / scale, color=ROLES["bound"], lw=0.8, ls="--", label="most live bytes"
    )
    ax.set(xlabel="runs of ops", ylabel=f"address in the arena, {unit}")
    ax.set(xlim=(0, buffers.n_times), ylim=(0, 1.02 * layout.arena_bytes / scale))
    ax.set_title(literal(graph.name))
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return ax


def _corners(buffers: Buffers, layout: Layout, scale: float) -> np.ndarray[tuple[int, ...]]:
    """The four corners of each rectangle, an array of buffers by 4 by 2."""
    low = np.array(layout.offsets_bytes, np.float64) / scale
    high = low + buffers.size_bytes / scale
    x = np.stack([buffers.start, buffers.start, buffers.end, buffers.end], axis=1)
    return np.stack([x, np.stack([low, high, high, low], axis=1)], axis=2)

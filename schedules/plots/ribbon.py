"""The schedule ribbon: what runs when and what is kept when, with one row a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plots.literal import literal
from remat.schedules.schedule import Schedule
from remat.schedules.views.palette import ROLES
from remat.schedules.views.ribbon import Span, ribbon
from remat.schedules.views.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 24
FAINT, STRONG = 0.25, 0.55
NARROWEST = 1.0
"""Width in points of the line around what runs again, so that a single run stays visible."""


def draw_ribbon(ax: Axes, graph: TrainingGraph, schedule: Schedule) -> Axes:
    """Draw Checkmate's R and S, folded by layer, over the runs of ops.

    Bars are runs. Behind them a row is shaded while a forward value of its layer is live, and
    darker while these are at least half of the most bytes that the layer ever holds.

    Raises
    ------
    ScheduleError : the schedule was not made for the graph, or is invalid.
    """
    line = timeline(graph, schedule)
    picture = ribbon(line)
    _draw(ax, picture.holds, ROLES["kept"], FAINT, 0.9, "")
    _draw(ax, picture.holds_most, ROLES["kept"], STRONG, 0.9, "kept")
    for name in ("forward", "backward", "recompute"):
        _draw(ax, getattr(picture, name), ROLES[name], 1.0, 0.6, name)
    every = -(-len(picture.titles) // MOST_LABELS)
    titles = [literal(title) for title in picture.titles]
    ax.set_yticks(range(0, len(titles), every), titles[::every], fontsize="small")
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
        height=height, facecolor=colour, edgecolor=colour, alpha=alpha, label=label or "_none",
        linewidth=NARROWEST if label == "recompute" else 0,
    )  # fmt: skip

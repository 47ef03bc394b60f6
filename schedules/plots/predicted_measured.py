"""Predicted against measured time of each op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.graph_capture.errors import GraphError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plots.literal import literal
from remat.schedules.views.palette import ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_predicted_measured(ax: Axes, predicted: TrainingGraph, measured: TrainingGraph) -> Axes:
    """Draw one point an op, on logarithmic axes. On the diagonal the two times agree.

    Parameters
    ----------
    predicted, measured : the same step, priced twice: modelled for a device and measured on it,
        or measured on two days. An op that takes no time in one of them is left out.

    Raises
    ------
    GraphError : they are not the same step.
    """
    pairs = paired_costs_us(predicted, measured)
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


def paired_costs_us(
    predicted: TrainingGraph, measured: TrainingGraph
) -> list[tuple[float, float, str]]:
    """Predicted and measured time of each op that takes any, and its phase."""
    if predicted.hash != measured.hash:
        raise GraphError(
            f"the two graphs are of different steps ({predicted.name}, hash {predicted.hash[:12]}, "
            f"and {measured.name}, hash {measured.hash[:12]}): capture the same model and batch"
        )
    ops = zip(predicted.ops, measured.ops, strict=True)
    return [(p.cost_us, m.cost_us, p.phase) for p, m in ops if p.cost_us > 0 and m.cost_us > 0]

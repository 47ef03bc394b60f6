"""Whether the model's own forward has room beside what is resident in a planned step."""

from __future__ import annotations

from remat.formats import bytes_text
from remat.graph_capture.derived.eager import as_unmodified
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links
from remat.schedules.as_planned import as_planned, whole
from remat.schedules.kept_in_forward import end_of_forward
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.unmodified_steps import forward_alone

SMALL_BYTES = 16 * 1024
"""What is not looked at: in models of a few kilobytes, roundings and the states of random streams
would decide."""


def why_no_room(
    graph: TrainingGraph,
    schedule: Schedule,
    links: Links | None,
    kept_bytes: int,
    *,
    is_block: bool,
    results_bytes: int = 0,
) -> str:
    """Why forward alone, which keeps nothing, would raise a step's peak; empty where it does not.

    Parameters
    ----------
    graph, schedule, links : of the plan. kept_bytes : of the state that is put back afterwards.
    is_block : whether the plan is for a part of a model. What others keep is in memory beside its
        forward, as it is beside the planned forward: only that peak is then known to fit.
    results_bytes : of what is held beside the planned step too.
    """
    need_bytes = simulate(*forward_alone(as_unmodified(whole(graph)))).peak_bytes + kept_bytes
    planned = simulate(graph, schedule, links)
    most_bytes = max(planned.peak_bytes, schedule.budget_bytes)
    if planned.peak_bytes + results_bytes > most_bytes + SMALL_BYTES:
        return f"its results take {bytes_text(results_bytes)} beside the planned step"
    if is_block:
        end = end_of_forward(as_planned(graph, schedule), schedule)
        most_bytes = max(planned.live_bytes[:end], default=0)
    if need_bytes <= most_bytes + SMALL_BYTES:
        return ""
    return (
        f"the model's own forward takes {bytes_text(need_bytes)}, and there is room for "
        f"{bytes_text(most_bytes)}"
    )

"""From the schedule of a sharded step to that of the step which is rewritten."""

from __future__ import annotations

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule, Step


def before_sharding(schedule: Schedule, graph: TrainingGraph) -> Schedule:
    """`schedule` without the steps that `graph` does not have; unchanged if made for `graph`.

    The model is sharded as a whole, so communication comes before forward, between it and backward,
    and last. Steps after the last op of `graph` are left out: freeing gradients once they are
    reduced is the wrapper's business.
    """
    if graph.hash in (schedule.graph_hash, schedule.captured_hash):
        return schedule

    def is_own(step: Step) -> bool:
        if isinstance(step, Compute):
            return step.op in graph.op_index
        return step.value in graph.value_by_name

    steps = [step for step in schedule.steps if is_own(step)]
    end = max(i for i, step in enumerate(steps) if isinstance(step, Compute))
    return Schedule.for_graph(
        graph,
        steps[: end + 1],
        budget_bytes=schedule.budget_bytes,
        solver=schedule.solver,
        options=schedule.options,
    )
